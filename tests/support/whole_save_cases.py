"""Saves of a loop one after the other, as one rank of a `GlooPool`."""

from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from evenload.integrations import fsdp2_loop
from fsdp2_case import Fsdp2Run, fsdp2_case
from packed_cases import error_of


class Saved(NamedTuple):
    """Names in the folder after a save, the message of a failed one, the step loaded then, names after two more saves
    of one step, and the message on all ranks where rank 0 cannot name the last one."""

    first: list[str]
    message: str
    num_steps: int
    last: list[str]
    unnamed: str


def save_again_and_fail(corpus: Path, saved: Path) -> Saved:
    """Save, fail at the end of the next save on rank 1 when its files are written, load, save twice, fail to name."""
    run = Fsdp2Run(fsdp2_case(), corpus, 0.0)
    loop = run.loop
    loop.save(saved)
    first = _names(saved)
    loop.num_steps = 1
    writing, naming = dcp.FileSystemWriter.write_data, fsdp2_loop.put_in_place

    def full(*arguments: Any, **options: Any) -> None:
        if dist.get_rank() == 1:
            writing(*arguments, **options).wait()
        raise OSError(28, "No space left on device")

    if dist.get_rank() == 1:
        dcp.FileSystemWriter.write_data = full
    message = error_of(loop.save, saved)
    dcp.FileSystemWriter.write_data = writing
    loop.load(saved)
    num_steps, loop.num_steps = loop.num_steps, 1
    loop.save(saved)
    loop.save(saved)
    last = _names(saved)
    fsdp2_loop.put_in_place = full
    unnamed = error_of(loop.save, saved)
    fsdp2_loop.put_in_place = naming
    run.loader.close()
    return Saved(first, message, num_steps, last, unnamed)


def _names(directory: Path) -> list[str]:
    dist.barrier()
    result = sorted(one.name for one in directory.iterdir())
    dist.barrier()
    return result


def errors_of_loading(corpus: Path, saved: Path) -> list[str]:
    """The errors of folders that cannot be saved to, of one without a checkpoint, and of a loader of other batches."""
    run = Fsdp2Run(fsdp2_case(), corpus, 0.0)
    messages = [error_of(run.loop.save, "s3://bucket/run")]
    # Other ranks have a folder of their own, as they would on another machine.
    messages.append(error_of(run.loop.load, saved / str(dist.get_rank())))
    run.loop.save(saved)
    run.loader.close()
    other = Fsdp2Run(fsdp2_case(loader={"batch_documents": 4}), corpus, 0.0)
    other.loader.close()
    return [*messages, error_of(other.loop.load, saved)]
