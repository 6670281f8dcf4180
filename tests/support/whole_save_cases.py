"""Saves of a loop one after the other, as one rank of a `GlooPool`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from engine_records import EngineCase
from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.fsdp2_loop import latest_place, name_latest, new_place
from fsdp2_case import Fsdp2Run, fsdp2_case


class Saved(NamedTuple):
    """What lies in the folder after a save, what a failed one says, and the step that is loaded after it."""

    first: list[str]
    message: str
    num_steps: int
    last: list[str]


def save_again_and_fail(corpus: Path, saved: Path) -> Saved:
    """Save, fail at the end of the next save on rank 1 when its files are written, load, save."""
    run = Fsdp2Run(fsdp2_case(), corpus, 0.0)
    loop = run.loop
    loop.save(saved)
    first = _names(saved)
    loop.num_steps = 1
    writing = dcp.FileSystemWriter.write_data

    def full_after_writing(*arguments: Any, **options: Any) -> None:
        writing(*arguments, **options).wait()
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = full_after_writing
    message = ""
    try:
        loop.save(saved)
    except CheckpointError as error:
        message = str(error)
    finally:
        dcp.FileSystemWriter.write_data = writing
    loop.load(saved)
    num_steps, loop.num_steps = loop.num_steps, 1
    loop.save(saved)
    run.loader.close()
    return Saved(first, message, num_steps, _names(saved))


def _names(directory: Path) -> list[str]:
    dist.barrier()
    found = sorted(one.name for one in directory.iterdir())
    dist.barrier()
    return found


def load_with_other_batches(corpus: Path, saved: Path) -> tuple[str, str]:
    """The error of a loop whose loader makes other batches than the saved one: its kind, and what it says."""
    run = Fsdp2Run(fsdp2_case(), corpus, 0.0)
    run.loop.save(saved)
    run.loader.close()
    case: EngineCase = fsdp2_case(loader={"batch_documents": 4})
    other = Fsdp2Run(case, corpus, 0.0)
    other.loader.close()
    try:
        other.loop.load(saved)
    except (CheckpointError, ConfigError) as error:
        return type(error).__name__, str(error)
    return "", ""


def places_of_saves(directory: Path) -> list[str]:
    """Where three saves of one step go."""
    names = []
    for _ in range(3):
        place = new_place(directory, 3)
        place.mkdir(exist_ok=True)
        dist.barrier()
        name_latest(place)
        names.append(latest_place(directory).name)
    return names


def errors_of_rank_zero(directory: Path) -> tuple[str, str]:
    """What all ranks say where rank 0 cannot write the name of a checkpoint, and where it finds none."""
    place = new_place(directory, 3)
    place.mkdir(exist_ok=True)
    # A folder of that name cannot be written as a file.
    (directory / "latest.part").mkdir(exist_ok=True)
    dist.barrier()
    said = []
    # Other ranks look at a folder of their own, as they would on another machine.
    own = directory if dist.get_rank() == 0 else directory / "elsewhere"
    for attempt in (lambda: name_latest(place), lambda: latest_place(own)):
        try:
            attempt()
        except CheckpointError as error:
            said.append(str(error))
    unnamed, missing = said
    return unnamed, missing
