"""Where a run's checkpoints lie: which are complete, which is resumed from, which are deleted.

Needs no torch: a run is refused, or says from where it goes on, before anything large is imported.
"""

import re
import shutil
from pathlib import Path

from evenload.errors import ConfigError

PROGRESS_FILE = "progress.json"
"""Written last; a checkpoint without it is none."""


def checkpoints_of(output_dir: str) -> Path:
    return Path(output_dir) / "checkpoints"


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the most steps, or None."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def checkpoint_to_resume(directory: Path, *, may_resume: bool) -> Path | None:
    """The latest checkpoint of a run's directory, None = it starts from the beginning; `ConfigError` where there is
    one, but `train.resume` is off."""
    found = latest_checkpoint(directory)
    if found is not None and not may_resume:
        raise ConfigError(
            f"train.resume is off, but {found} is a checkpoint of an earlier run; go on with train.resume=true, choose "
            "another train.output_dir, or remove the old checkpoints"
        )
    return found


def complete_checkpoints(directory: Path) -> list[Path]:
    """All complete ones, fewest steps first."""
    return [path for path in _named_checkpoints(directory) if (path / PROGRESS_FILE).is_file()]


def _named_checkpoints(directory: Path) -> list[Path]:
    named = (path for path in directory.glob("step-*") if is_step_name(path.name))
    return sorted(named, key=steps_in_name)


def is_step_name(name: str) -> bool:
    """A checkpoint is called so, complete or not."""
    return re.fullmatch(r"step-\d{8,}", name) is not None


def steps_in_name(path: Path) -> int:
    """Steps that a directory with such a name should hold."""
    return int(path.name.split("-")[1])


def skipped_checkpoints(directory: Path, taken: Path | None) -> list[str]:
    """Why directories that are named like newer checkpoints than `taken`, which is resumed from, are not."""
    instead = f"going on from {taken.name}" if taken is not None else "starting from the beginning"
    return [
        f"{path} is not a complete checkpoint (no {PROGRESS_FILE}, which is written last) and is passed over; {instead}"
        for path in _named_checkpoints(directory)
        if (taken is None or steps_in_name(path) > steps_in_name(taken)) and not (path / PROGRESS_FILE).is_file()
    ]


def checkpoint_path(directory: Path, steps_done: int) -> Path:
    """Where the checkpoint after so many steps lies."""
    return directory / f"step-{steps_done:08d}"


def partial_path(directory: Path, steps_done: int) -> Path:
    """Where it is written before it is complete."""
    return directory / f".step-{steps_done:08d}.partial"


def remove_leftovers(directory: Path) -> None:
    """Delete what interrupted saves and removals left behind."""
    for pattern in (".step-*.partial", ".step-*.removed"):
        for path in directory.glob(pattern):
            shutil.rmtree(path)


def prune_checkpoints(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` complete checkpoints; 0 keeps all. Never deletes the newest. A checkpoint loses
    its name before its files, so that half of one is never taken for a whole one."""
    for path in complete_checkpoints(directory)[:-keep] if keep else ():
        removed = directory / f".{path.name}.removed"
        path.rename(removed)
        shutil.rmtree(removed)
