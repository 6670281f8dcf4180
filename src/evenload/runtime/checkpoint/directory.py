"""Where checkpoints of a run lie: which are complete, resumed from, deleted, and have the smallest validation losses.

    step-00000004               complete, if it holds progress.json
    .step-00000004.partial      being written
    .step-00000004.replaced     complete, and what counts until step-00000004 is there, which is written again
    .step-00000004.removed      has lost its name, its files are going
    best.json                   names the checkpoint with the smallest validation loss

Wherever the machine ends, the old checkpoint or the new one is whole. Passes over the validation data with the smallest
losses travel in every `progress.json`; a pass counts while its checkpoint is there. Needs no torch.
"""

import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from evenload.errors import ConfigError
from evenload.types.base import Frozen

PROGRESS_FILE = "progress.json"  # written last

_NAMED, _REPLACED = "step-*", ".step-*.replaced"
_STEP_NAME = re.compile(r"step-(?P<final>\d{8,})|\.step-(?P<replaced>\d{8,})\.replaced")


def checkpoints_of(output_dir: str) -> Path:
    return Path(output_dir) / "checkpoints"


def latest_checkpoint(directory: Path) -> Path | None:
    """Return the complete checkpoint of the most steps, or None."""
    return next(reversed(complete_checkpoints(directory)), None)


def checkpoint_to_resume(directory: Path, *, may_resume: bool) -> Path | None:
    """Return the latest checkpoint, or None; `ConfigError` where there is one and `train.resume` is off."""
    newest = latest_checkpoint(directory)
    if newest is not None and not may_resume:
        raise ConfigError(
            f"train.resume is off, but {newest} is a checkpoint of an earlier run; go on with train.resume=true, "
            "choose another train.output_dir, or remove the old checkpoints"
        )
    return newest


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return all complete checkpoints, fewest steps first; one a number of steps."""
    # Of a step that is written again, what has its name counts, if it is whole.
    both = (*_checkpoints(directory, _REPLACED), *_checkpoints(directory, _NAMED))
    complete = {steps_in_name(path): path for path in both if _is_complete(path)}
    return [complete[steps_done] for steps_done in sorted(complete)]


def _checkpoints(directory: Path, names: str) -> list[Path]:
    return sorted((path for path in directory.glob(names) if _STEP_NAME.fullmatch(path.name)), key=steps_in_name)


def _is_complete(path: Path) -> bool:
    return (path / PROGRESS_FILE).is_file()


def steps_in_name(path: Path) -> int:
    """Return the steps that a directory with such a name should hold."""
    named = _STEP_NAME.fullmatch(path.name)
    assert named is not None, path
    return int(named["final"] or named["replaced"])


def skipped_checkpoints(directory: Path, taken: Path | None) -> list[str]:
    """Say why directories named like newer checkpoints than `taken`, from which the run resumes, are passed over."""
    instead = f"going on from {taken.name}" if taken is not None else "starting from the beginning"
    return [
        f"{path} is not a complete checkpoint (no {PROGRESS_FILE}, which is written last) and is passed over; {instead}"
        for path in _checkpoints(directory, _NAMED)
        if (taken is None or steps_in_name(path) > steps_in_name(taken)) and not _is_complete(path)
    ]


def checkpoint_path(directory: Path, steps_done: int) -> Path:
    return directory / f"step-{steps_done:08d}"


def partial_path(directory: Path, steps_done: int) -> Path:
    return directory / f".step-{steps_done:08d}.partial"


def put_in_place(partial: Path, final: Path) -> None:
    """Give a written checkpoint its name. One that has it counts until then; `prune_checkpoints` removes it."""
    if final.exists():
        final.rename(final.with_name(f".{final.name}.replaced"))
        sync(final.parent)
    partial.rename(final)
    sync(final.parent)


def remove_leftovers(directory: Path) -> None:
    """Delete what interrupted saves left; a checkpoint that was not replaced gets its name back."""
    for path in _checkpoints(directory, _REPLACED):
        final = checkpoint_path(directory, steps_in_name(path))
        if not _is_complete(path) or _is_complete(final):
            _remove(path)
            continue
        if final.exists():
            _remove(final)
        path.rename(final)
    for path in (*directory.glob(".step-*.partial"), *directory.glob(".step-*.removed")):
        shutil.rmtree(path)


def prune_checkpoints(directory: Path, keep: int, best_steps: Collection[int] = ()) -> None:
    """Delete all but the newest `keep` checkpoints, 0 = all, and those after `best_steps` steps; never the newest."""
    for path in _checkpoints(directory, _REPLACED):
        if _is_complete(checkpoint_path(directory, steps_in_name(path))):
            _remove(path)
    for path in complete_checkpoints(directory)[:-keep] if keep else ():
        if steps_in_name(path) not in best_steps:
            _remove(path)


def sync(path: Path) -> None:
    """Wait until a file or a directory's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    # A checkpoint loses its name before its files, so that half of one is never taken for a whole one.
    removed = path.with_name(f".{path.name.strip('.').removesuffix('.replaced')}.removed")
    if removed.exists():  # of a removal that was interrupted
        shutil.rmtree(removed)
    path.rename(removed)
    shutil.rmtree(removed)


BEST_FILE = "best.json"


class BestPass(Frozen):
    """A pass over the validation data with one of the smallest losses, after so many steps."""

    steps_done: int
    loss: float


def with_pass(
    saved: Iterable[BestPass], steps_done: int, loss: float | None, keep: int
) -> tuple[tuple[BestPass, ...], bool]:
    """Add a pass whose checkpoint is still to be written to those saved, in place of one after as many steps.

    Returns:
        The passes, best first, of equal losses the earlier one, and whether the new one is among the best `keep`. If
        so, the pass that it drives out stays on the list: it counts again where the new checkpoint cannot be written.
    """
    passes = [one for one in saved if one.steps_done != steps_done]
    if loss is not None and math.isfinite(loss):
        passes.append(BestPass(steps_done=steps_done, loss=loss))
    ordered = tuple(sorted(passes, key=lambda one: (one.loss, one.steps_done)))
    is_best = any(one.steps_done == steps_done for one in ordered[:keep])
    return (ordered if is_best else ordered[:keep]), is_best


def saved_passes(directory: Path, best: Iterable[BestPass], keep: int) -> tuple[BestPass, ...]:
    """Return the first `keep` of the passes whose checkpoints are complete."""
    there = {steps_in_name(path) for path in complete_checkpoints(directory)}
    return tuple(one for one in best if one.steps_done in there)[:keep]


def write_best(directory: Path, saved: Sequence[BestPass]) -> None:
    """Write `best.json` for the first of the passes, whose checkpoints are there; remove it where there is none."""
    if not saved:
        (directory / BEST_FILE).unlink(missing_ok=True)
        return
    name = checkpoint_path(directory, saved[0].steps_done).name
    best = {"checkpoint": name, "steps_done": saved[0].steps_done, "validation_loss": saved[0].loss}
    new = directory / f".{BEST_FILE}"
    new.write_bytes(msgspec.json.encode(best) + b"\n")
    sync(new)
    os.replace(new, directory / BEST_FILE)
