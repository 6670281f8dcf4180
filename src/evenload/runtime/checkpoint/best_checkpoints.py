"""Which checkpoints have the smallest validation losses; `best.json` beside them names the best one.

What was found so far travels in `progress.json` of every checkpoint, so a resumed run goes on with it. A pass counts
while its checkpoint is there: a save may fail after its pass, and an older one must not have made room for it.
"""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from evenload.runtime.checkpoint.directory import checkpoint_path, complete_checkpoints, steps_in_name, sync
from evenload.types.base import Frozen

BEST_FILE = "best.json"


class BestPass(Frozen):
    """A pass over the validation data with one of the smallest losses, after so many steps."""

    steps_done: int
    loss: float


class BestCheckpoint(Frozen):
    """best.json: the checkpoint, by its directory's name, with the smallest validation loss."""

    checkpoint: str
    steps_done: int
    validation_loss: float


def with_pass(
    saved: Iterable[BestPass], steps_done: int, loss: float | None, keep: int
) -> tuple[tuple[BestPass, ...], bool]:
    """Passes, best first, with another one whose checkpoint is still to be written, and whether it is among the best
    `keep`; of equal losses the earlier counts. If it is, the one that it drives out stays on the list: its checkpoint
    is the best one again where the new one's cannot be written. A pass after as many steps is replaced: a resumed run
    makes it again.

    Args:
        saved: passes whose checkpoints are there.
    """
    found = [one for one in saved if one.steps_done != steps_done]
    if loss is not None and math.isfinite(loss):
        found.append(BestPass(steps_done=steps_done, loss=loss))
    ordered = tuple(sorted(found, key=lambda one: (one.loss, one.steps_done)))
    is_best = any(one.steps_done == steps_done for one in ordered[:keep])
    return (ordered if is_best else ordered[:keep]), is_best


def saved_passes(directory: Path, best: Iterable[BestPass], keep: int) -> tuple[BestPass, ...]:
    """The first `keep` of the passes whose checkpoints are there and complete."""
    there = {steps_in_name(path) for path in complete_checkpoints(directory)}
    return tuple(one for one in best if one.steps_done in there)[:keep]


def note_best(directory: Path, saved: Sequence[BestPass]) -> None:
    """Write `best.json` for the first of the passes, whose checkpoints are there; without any there is no such file."""
    if not saved:
        (directory / BEST_FILE).unlink(missing_ok=True)
        return
    told = BestCheckpoint(
        checkpoint=checkpoint_path(directory, saved[0].steps_done).name,
        steps_done=saved[0].steps_done,
        validation_loss=saved[0].loss,
    )
    new = directory / f".{BEST_FILE}"
    new.write_bytes(msgspec.json.encode(told) + b"\n")
    sync(new)
    os.replace(new, directory / BEST_FILE)
