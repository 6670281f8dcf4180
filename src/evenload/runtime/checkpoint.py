"""Checkpoints: sharded with `torch.distributed.checkpoint`, independent of the layout.

A checkpoint is a directory `step-<n>` with

    .metadata, *.distcp    tensors: parameters by Hugging Face name; AdamW state by unit ("layer.3.decay") as DTensors
                           over the data-parallel ranks, so any dp and pp can load it; random states by rank
    loader.json            where the loader stands, ledger included; global and small (positions, no text)
    cost.json              the cost coefficients that planned the run, so that coming plans stay the same
    progress.json          steps done, layout, state of the planner; written last: without it there is no checkpoint

Every tensor is written once: a parameter, which all replicas of a stage hold, by the replica that has least to write
so far; AdamW state by the replica that owns the shard. Resuming at the same layout is exact to the bit; at another,
up to summation order, and random states start anew (nothing in a step draws random numbers). Saving is in
`checkpoint_writer.py`.

Price: reading takes what the disk gives; a rank reads only its own stage.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.errors import ConfigError
from evenload.plan.delay import DelayState
from evenload.runtime.mesh import Mesh
from evenload.runtime.optimizer import ShardedAdamW
from evenload.runtime.parameter_units import FlatBuffer
from evenload.types.base import Frozen

PROGRESS_FILE = "progress.json"
LOADER_FILE = "loader.json"
COST_FILE = "cost.json"


class Progress(Frozen):
    """`progress.json`: what a run needs besides tensors and the loader to go on.

    Args:
        steps_done: optimizer steps taken.
        layout: that saved, as `ParallelLayout.describe` says it.
        planner: documents that wait for a later step, and what the planner learnt about lengths.
    """

    steps_done: int
    layout: str
    planner: DelayState = DelayState()


@dataclass(frozen=True, eq=False, kw_only=True)
class RunPosition:
    """Everything of a checkpoint that is not a tensor.

    Args:
        loader: encoded loader state after the steps done.
        coefficients: of the run's cost model; None before it has any.
    """

    progress: Progress
    loader: bytes
    coefficients: CostCoefficients | None


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """One tensor of the checkpoint as this rank holds it.

    Args:
        local: the whole tensor, or this rank's part of a flat one.
        num_elements: of the flat tensor over all replicas; None = `local` is whole.
    """

    local: Tensor
    num_elements: int | None = None

    def on(self, replicas: DeviceMesh) -> Tensor:
        """As `torch.distributed.checkpoint` wants it."""
        if self.num_elements is None:
            return self.local
        shape = torch.Size([self.num_elements])
        return DTensor.from_local(self.local, replicas, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def load_checkpoint(path: Path, buffers: list[FlatBuffer], optimizer: ShardedAdamW, mesh: Mesh) -> RunPosition:
    """Read a checkpoint into the parameters, the optimizer and, at the same layout, the random states. Collective.

    Raises:
        ConfigError: not a complete checkpoint, of another version, or of another model.
    """
    position = _read_position(path)
    replicas = DeviceMesh.from_group(mesh.data, mesh.device.type)
    tensors = {name: part.on(replicas) for name, part in run_tensors(buffers, optimizer, mesh).items()}
    random_states = {}
    if position.progress.layout == mesh.layout.describe():
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        random_states = {name: part.local for name, part in random_tensors(mesh).items() if name in saved}
    try:
        load(tensors | random_states, checkpoint_id=path, process_group=mesh.control)
    except CheckpointException as error:
        raise ConfigError(f"checkpoint {path} does not fit the configured model: {first_failure(error)}") from error
    optimizer.set_num_steps(position.progress.steps_done)
    _restore_random(random_states, mesh)
    return position


def latest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint of the most steps, or None."""
    found = complete_checkpoints(directory)
    return found[-1] if found else None


def complete_checkpoints(directory: Path) -> list[Path]:
    """All complete ones, fewest steps first."""
    named = (path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name))
    return sorted(
        (path for path in named if (path / PROGRESS_FILE).is_file()), key=lambda path: int(path.name.split("-")[1])
    )


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
    """Delete all but the newest `keep` complete checkpoints; 0 keeps all. Never deletes the newest.

    A checkpoint loses its name before its files, so that half of one is never taken for a whole one.
    """
    for path in complete_checkpoints(directory)[:-keep] if keep else ():
        removed = directory / f".{path.name}.removed"
        path.rename(removed)
        shutil.rmtree(removed)


def run_tensors(buffers: list[FlatBuffer], optimizer: ShardedAdamW, mesh: Mesh) -> dict[str, ShardedTensor]:
    """All tensors of this rank's stage by name; views of live storage, so loading fills the run in place."""
    tensors: dict[str, ShardedTensor] = {}
    for buffer in buffers:
        # A tied head is the embedding; the first stage saves it for both, and both load it.
        for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
            tensors[f"model.{_stored_name(name, buffer)}"] = ShardedTensor(parameter.detach())
    replica = dist.get_rank(mesh.data)
    for kind, buffer, shard in optimizer.state_tensors():
        key = f"optimizer.{_stored_name(buffer.key, buffer)}.{kind}"
        # torch cuts Shard(0) of n elements into ceil(n / replicas) a rank, as `flatten_units` pads.
        start = replica * shard.numel()
        valid = shard[: max(0, min(shard.numel(), buffer.num_elements - start))]
        tensors[key] = ShardedTensor(valid, buffer.num_elements)
    return tensors


def tensors_to_write(tensors: dict[str, ShardedTensor], mesh: Mesh) -> dict[str, ShardedTensor]:
    """This rank's part of what all replicas of its stage hold: every whole tensor has one writer.

    All replicas come to the same division without a word: each tensor goes to the replica with the fewest bytes.
    """
    replica, num_replicas = dist.get_rank(mesh.data), dist.get_world_size(mesh.data)
    assigned_bytes = [0] * num_replicas
    mine = {}
    for name, tensor in tensors.items():
        if tensor.num_elements is None:
            writer = assigned_bytes.index(min(assigned_bytes))
            assigned_bytes[writer] += tensor.local.nbytes
            if writer != replica:
                continue
        mine[name] = tensor
    return mine


def random_tensors(mesh: Mesh) -> dict[str, ShardedTensor]:
    """Copies of this process's random states, uint8, by rank."""
    states = {f"random.{mesh.rank}.cpu": ShardedTensor(torch.get_rng_state())}
    if mesh.device.type == "cuda":
        states[f"random.{mesh.rank}.cuda"] = ShardedTensor(torch.cuda.get_rng_state(mesh.device))
    return states


def first_failure(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed, in one line."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


def _restore_random(states: dict[str, Tensor], mesh: Mesh) -> None:
    for name, state in states.items():
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(state, mesh.device)
        else:
            torch.set_rng_state(state)


def _read_position(path: Path) -> RunPosition:
    if not (path / PROGRESS_FILE).is_file():
        raise ConfigError(f"{path} is not a complete checkpoint (no {PROGRESS_FILE})")
    try:
        progress = msgspec.json.decode((path / PROGRESS_FILE).read_bytes(), type=Progress)
        loader = (path / LOADER_FILE).read_bytes()
    except (msgspec.MsgspecError, OSError) as error:
        raise ConfigError(
            f"checkpoint {path} cannot be read by this version of Evenload: {error}; go on with the version that wrote "
            "it, or start anew in another train.output_dir"
        ) from error
    costs = path / COST_FILE
    return RunPosition(
        progress=progress, loader=loader, coefficients=read_coefficients(costs) if costs.is_file() else None
    )


def _stored_name(name: str, buffer: FlatBuffer) -> str:
    """Name in the checkpoint; both copies of a tied weight go by the embedding's."""
    if not buffer.tied:
        return name
    return {"lm_head.weight": "model.embed_tokens.weight", "head.decay": "embedding.decay"}.get(name, name)
