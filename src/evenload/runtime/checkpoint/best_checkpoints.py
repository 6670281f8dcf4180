"""Which checkpoints have the smallest validation losses; `best.json` beside them names the best one.

What was found so far travels in `progress.json` of every checkpoint, so a resumed run goes on with it.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from evenload.runtime.checkpoint.directory import checkpoint_path, sync
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


def with_pass(best: Iterable[BestPass], steps_done: int, loss: float | None, keep: int) -> tuple[BestPass, ...]:
    """The best `keep` passes, best first, with another one; of equal losses the earlier counts. A pass after as many
    steps is replaced: a resumed run makes it again."""
    found = [one for one in best if one.steps_done != steps_done]
    if loss is not None and math.isfinite(loss):
        found.append(BestPass(steps_done=steps_done, loss=loss))
    return tuple(sorted(found, key=lambda one: (one.loss, one.steps_done))[:keep])


def note_best(directory: Path, best: Iterable[BestPass]) -> None:
    """Write `best.json`, if a checkpoint of one of the passes is there; the best of them counts."""
    for one in best:
        path = checkpoint_path(directory, one.steps_done)
        if path.is_dir():
            told = BestCheckpoint(checkpoint=path.name, steps_done=one.steps_done, validation_loss=one.loss)
            new = directory / f".{BEST_FILE}"
            new.write_bytes(msgspec.json.encode(told) + b"\n")
            sync(new)
            os.replace(new, directory / BEST_FILE)
            return


def best_checkpoint(directory: Path) -> BestCheckpoint | None:
    """What `best.json` says; None where there is none."""
    try:
        return msgspec.json.decode((directory / BEST_FILE).read_bytes(), type=BestCheckpoint)
    except FileNotFoundError:
        return None
