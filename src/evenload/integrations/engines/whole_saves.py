"""Checkpoints of a loop that are there whole or not at all: each is written beside the last one, and then named.

    checkpoint/step-40/     written by all ranks
    checkpoint/latest       "step-40", replaced by one rename when they are done

A run that is killed while it saves goes on from the checkpoint before; the next save takes away what it left.
"""

import re
import shutil
from pathlib import Path

from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.engines.told_by_rank_zero import told_by_rank_zero
from evenload.runtime.checkpoint.directory import sync

LATEST = "latest"
_PLACE = re.compile(r"step-\d+(-again)?")


def new_place(directory: Path, num_steps: int) -> Path:
    """A folder for the next checkpoint, which is not that of the last one. Collective.

    Raises:
        CheckpointError: rank 0 cannot read there; on all ranks.
        ConfigError: an address in place of a folder.
    """
    if "://" in str(directory):
        raise ConfigError(f"'{directory}' is an address; give a folder that all ranks reach")

    def free_name() -> str:
        name = f"step-{num_steps}"
        free = f"{name}-again" if _latest_name(directory) == name else name
        # What a killed run left there would be mixed with what is written now.
        shutil.rmtree(directory / free, ignore_errors=True)
        return free

    return directory / told_by_rank_zero(free_name, f"'{directory}' cannot be read")


def name_latest(place: Path) -> None:
    """Call once all ranks have written: from now on this is the checkpoint, and earlier ones go. Collective.

    Raises:
        CheckpointError: rank 0 could not write its name; on all ranks. The one before is still the last one.
    """

    def write_name() -> None:
        # The name is on the disk before the earlier checkpoint goes, and what it names before the name.
        sync(place)
        part = place.with_name(f"{LATEST}.part")
        part.write_text(place.name)
        sync(part)
        part.replace(place.with_name(LATEST))
        sync(place.parent)

    told_by_rank_zero(write_name, f"'{place}' was written, but could not be named the last checkpoint")
    told_by_rank_zero(
        lambda: _remove_others(place), f"'{place}' is the last checkpoint, but earlier ones still lie there"
    )


def latest_place(directory: Path) -> Path:
    """The folder of the last whole checkpoint, by what rank 0 reads. Collective.

    Raises:
        CheckpointError: there is none, or rank 0 cannot read there; on all ranks.
    """
    name = told_by_rank_zero(lambda: _latest_name(directory), f"'{directory}' cannot be read")
    if not name:
        raise CheckpointError(f"'{directory}' holds no whole checkpoint; give the folder that save wrote")
    return directory / name


def _remove_others(place: Path) -> None:
    for other in place.parent.iterdir():
        if other.name != place.name and _PLACE.fullmatch(other.name):
            shutil.rmtree(other, ignore_errors=True)


def _latest_name(directory: Path) -> str:
    file = directory / LATEST
    return file.read_text().strip() if file.is_file() else ""
