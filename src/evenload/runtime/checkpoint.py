"""Checkpoints: sharded with `torch.distributed.checkpoint`, independent of the layout.

A checkpoint is a directory `step-<n>` with

    model and optimizer tensors   parameters by Hugging Face name; AdamW state by unit ("layer.3.decay") as
                                  DTensors over the data-parallel ranks, so any dp and pp can load it
    progress.json                 steps done, states of loader and planner

It is written under another name and renamed when complete, so an interrupted save is never mistaken for
a checkpoint. Resuming at the same layout is exact to the bit; at another, up to summation order.
"""

import shutil
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from evenload.errors import ConfigError
from evenload.plan.delay import DelayState
from evenload.runtime.mesh import Mesh
from evenload.runtime.optimizer import ShardedAdamW
from evenload.runtime.parameter_units import FlatBuffer
from evenload.types.base import Frozen

_PROGRESS = "progress.json"


class Progress(Frozen):
    """What a run needs besides tensors to go on.

    Args:
        steps_done: optimizer steps taken.
        loader: encoded loader state after those steps.
        planner: documents that wait for a later step, and what the planner learnt about lengths.
    """

    steps_done: int
    loader: str
    planner: DelayState = DelayState()


def save_checkpoint(
    directory: Path, progress: Progress, buffers: list[FlatBuffer], optimizer: ShardedAdamW, mesh: Mesh
) -> Path:
    """Write `directory/step-<n>`. Collective. Returns its path."""
    final = directory / f"step-{progress.steps_done:08d}"
    partial = directory / f".{final.name}.partial"
    if mesh.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group=mesh.control)
    save(_tensors(buffers, optimizer, mesh), checkpoint_id=partial, process_group=mesh.control)
    if mesh.rank == 0:
        (partial / _PROGRESS).write_bytes(msgspec.json.encode(progress))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier(group=mesh.control)
    return final


def load_checkpoint(path: Path, buffers: list[FlatBuffer], optimizer: ShardedAdamW, mesh: Mesh) -> Progress:
    """Read a checkpoint into the parameters and the optimizer. Collective.

    Raises:
        ConfigError: not a complete checkpoint, or of another model.
    """
    if not (path / _PROGRESS).is_file():
        raise ConfigError(f"{path} is not a complete checkpoint (no {_PROGRESS})")
    progress = msgspec.json.decode((path / _PROGRESS).read_bytes(), type=Progress)
    tensors = _tensors(buffers, optimizer, mesh)
    try:
        load(tensors, checkpoint_id=path, process_group=mesh.control)
    except CheckpointException as error:
        raise ConfigError(f"checkpoint {path} does not fit the configured model: {error}") from error
    optimizer.set_num_steps(progress.steps_done)
    return progress


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the most steps, or None."""
    found = sorted(p for p in directory.glob("step-*") if (p / _PROGRESS).is_file())
    return found[-1] if found else None


def _tensors(buffers: list[FlatBuffer], optimizer: ShardedAdamW, mesh: Mesh) -> dict[str, Tensor]:
    """All tensors by name; views of live storage, so loading fills the run in place."""
    data_mesh = DeviceMesh.from_group(mesh.data, mesh.device.type)
    tensors: dict[str, Tensor] = {}
    for buffer in buffers:
        # A tied head is the embedding; the first stage saves it for both, and both load it.
        for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
            tensors[f"model.{_stored_name(name, buffer)}"] = parameter.detach()
    for kind, buffer, shard in optimizer.state_tensors():
        key = f"optimizer.{_stored_name(buffer.key, buffer)}.{kind}"
        # torch cuts Shard(0) of n elements into ceil(n / dp) a rank, as `flatten_units` pads.
        start = mesh.dp_rank * shard.numel()
        valid = shard[: max(0, min(shard.numel(), buffer.num_elements - start))]
        tensors[key] = DTensor.from_local(
            valid, data_mesh, [Shard(0)], run_check=False, shape=torch.Size([buffer.num_elements]), stride=(1,)
        )
    return tensors


def _stored_name(name: str, buffer: FlatBuffer) -> str:
    """Name in the checkpoint; both copies of a tied weight go by the embedding's."""
    if not buffer.tied:
        return name
    return {"lm_head.weight": "model.embed_tokens.weight", "head.decay": "embedding.decay"}.get(name, name)
