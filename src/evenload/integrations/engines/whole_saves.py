"""Checkpoints of a loop that are there whole or not at all: each is written beside the last one, and then named.

    checkpoint/step-40/     written by all ranks
    checkpoint/latest       "step-40", replaced by one rename when they are done

A run that is killed while it saves goes on from the checkpoint before; the next save takes away what it left.
"""

import re
import shutil
from pathlib import Path

import torch.distributed as dist

from evenload.errors import CheckpointError, ConfigError

LATEST = "latest"
_PLACE = re.compile(r"step-\d+(-again)?")


def new_place(directory: Path, num_steps: int) -> Path:
    """A folder for the next checkpoint, which is not that of the last one. Collective.

    Raises:
        ConfigError: an address in place of a folder.
    """
    if "://" in str(directory):
        raise ConfigError(f"'{directory}' is an address; give a folder that all ranks reach")
    told: list[str] = [""]
    if dist.get_rank() == 0:
        name = f"step-{num_steps}"
        told[0] = f"{name}-again" if _latest_name(directory) == name else name
        # What a killed run left there would be mixed with what is written now.
        shutil.rmtree(directory / told[0], ignore_errors=True)
    dist.broadcast_object_list(told, src=0)
    return directory / told[0]


def name_latest(place: Path) -> None:
    """Call once all ranks have written: from now on this is the checkpoint, and earlier ones go. Collective."""
    if dist.get_rank() == 0:
        part = place.with_name(f"{LATEST}.part")
        part.write_text(place.name)
        part.replace(place.with_name(LATEST))
        for other in place.parent.iterdir():
            if other.name != place.name and _PLACE.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)
    dist.barrier()


def latest_place(directory: Path) -> Path:
    """The folder of the last whole checkpoint; a `CheckpointError` where there is none."""
    name = _latest_name(directory)
    if not name:
        raise CheckpointError(f"'{directory}' holds no whole checkpoint; give the folder that save wrote")
    return directory / name


def _latest_name(directory: Path) -> str:
    file = directory / LATEST
    return file.read_text().strip() if file.is_file() else ""
