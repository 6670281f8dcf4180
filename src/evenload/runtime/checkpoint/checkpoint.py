"""Checkpoints: sharded with `torch.distributed.checkpoint`, independent of the layout.

A checkpoint is a directory `step-<n>` with

    .metadata, *.distcp    tensors: parameters by Hugging Face name; AdamW state by parameter; both in boxes of the
                           whole tensor (`pieces`), so any layout can load them; random states by rank
    loader.json            where the loader stands, ledger included
    cost.json              the cost coefficients that planned the run, so that coming plans stay the same
    progress.json          steps done, layout, state of the planner, digest of loader.json; written last: without it
                           there is no checkpoint

Every tensor is written once: a parameter, which all replicas of a stage hold, by the replica that has least to write so
far; AdamW state by its owner; what a tensor-parallel group holds whole by its first rank. Resuming at the same layout
is exact to the bit; at another, up to summation order, and random states start anew. A rank reads only its own stage.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.errors import ConfigError
from evenload.planning.deferral import DelayState
from evenload.planning.layouts.flex_planner import FlexState
from evenload.planning.layouts.measured_layouts import MeasuredAfter
from evenload.runtime.checkpoint.directory import PROGRESS_FILE, BestPass, checkpoint_to_resume, steps_in_name
from evenload.runtime.checkpoint.pieces import (
    PieceLoadPlanner,
    SafeIndexReader,
    TensorPieces,
    pieces_of_range,
    read_metadata,
    whole_tensor,
)
from evenload.runtime.comm.mesh import Mesh, share_of_first
from evenload.runtime.model.tensor_weights import tensor_split
from evenload.runtime.optim.data_parallel import FlatBuffer
from evenload.runtime.optim.optimizer import AVERAGE, LOWER_HALF, MASTER
from evenload.runtime.stages.rank_state import RankState
from evenload.types.base import Frozen
from evenload.types.run import RunTotals
from evenload.types.text import counted

LOADER_FILE = "loader.json"
COST_FILE = "cost.json"
STEPS_TENSOR = "run.steps_done"


class Progress(Frozen):
    """`progress.json`: what a run needs besides tensors and the loader to go on.

    Args:
        strategy: that planned the last steps.
        skipped_steps: of the steps done, those whose update was not applied because it was not finite.
        planner: documents that wait for a later step, and what the planner learnt about lengths.
        flex: the layout after the steps done and what the planner remembers of it, where it may change.
        layouts_known: what trained steps showed of layouts, after each of the last steps.
        best: passes over the validation data with the smallest losses, best first.
        validation_digest: of the settings under which losses in `best` were computed; "" = there is no validation.
        loader_digest: SHA-256 of `loader.json`; set when it is written.
    """

    steps_done: int
    layout: str
    strategy: str = ""
    skipped_steps: int = 0
    totals: RunTotals = RunTotals()
    planner: DelayState = DelayState()
    flex: FlexState | None = None
    layouts_known: tuple[MeasuredAfter, ...] = ()
    best: tuple[BestPass, ...] = ()
    validation_digest: str = ""
    loader_digest: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunPosition:
    """Holds everything of a checkpoint that is not a tensor; no coefficients = the run has none yet."""

    progress: Progress
    loader: bytes
    coefficients: CostCoefficients | None


def checkpoint_for_all(directory: Path, mesh: Mesh, *, may_resume: bool) -> Path | None:
    """Return the checkpoint that all resume from, as rank 0 sees it, or None. `ConfigError`: not allowed.
    Collective."""
    newest = checkpoint_to_resume(directory, may_resume=may_resume)
    name = share_of_first(newest and newest.name, mesh, "the name of the checkpoint to resume from")
    return directory / name if name else None


def load_checkpoint(path: Path, state: RankState) -> RunPosition:
    """Read a checkpoint into parameters, optimizer and, at the same layout, random states. Collective. `ConfigError`
    where it is not complete, was changed, or is of another version or model."""
    position, mesh = _read_position(path), state.mesh
    metadata = read_metadata(path)
    saved, tensors = metadata.state_dict_metadata, run_tensors(state)
    _require_same_state(path, tensors, saved)
    random_states = {}
    if position.progress.layout == mesh.layout.describe():
        random_states = {name: part for name, part in random_tensors(mesh).items() if name in saved}
    steps = torch.zeros(1, dtype=torch.int64)
    try:
        load(
            tensors | random_states | {STEPS_TENSOR: whole_tensor(steps)},
            storage_reader=SafeIndexReader(path, metadata),
            planner=PieceLoadPlanner(),
            process_group=mesh.control,
        )
    except CheckpointException as error:
        why = first_failure(error)
        raise ConfigError(f"checkpoint {path} is damaged or does not fit the configured model: {why}") from error
    _require_same_steps(path, position.progress.steps_done, int(steps), "its tensors say")
    state.optimizer.num_steps = position.progress.steps_done - position.progress.skipped_steps
    for name, part in random_states.items():
        (local,) = part.pieces.values()
        if name.endswith(".cuda"):
            torch.cuda.set_rng_state(local, mesh.device)
        else:
            torch.set_rng_state(local)
    return position


def _require_same_state(path: Path, wanted: Collection[str], saved: Collection[str]) -> None:
    """The run's optimizer finds all of its state, and none is dropped, of the parameters that this rank updates."""
    mine, there = _kinds_of_state(wanted), _kinds_of_state(saved)
    for parameter, kinds in mine.items():
        result = there.get(parameter, set())
        if kinds == result or f"model.{parameter}" not in saved:
            continue
        differing = kinds ^ result
        moments, other_dtype = "optimizer.moments", "model.dtype, since only 16-bit weights have masters"
        causes = {
            f"it was saved under another {moments if LOWER_HALF in differing else other_dtype}": {LOWER_HALF, MASTER},
            "train.ema_decay is set in one of both only": {AVERAGE},
        }
        known = [cause for cause, of_cause in causes.items() if differing & of_cause]
        if differing - {MASTER, LOWER_HALF, AVERAGE}:
            known.append("it was saved under another optimizer.name")
        raise ConfigError(
            f"checkpoint {path} has {sorted(result)} of {parameter}, this run's optimizer keeps {sorted(kinds)}: "
            f"{', and '.join(known)}. Go on with the settings that it was saved under, or start anew from its weights "
            "in another train.output_dir"
        )


def _kinds_of_state(names: Collection[str]) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if name.startswith("optimizer."):
            parameter, _, kind = name.removeprefix("optimizer.").rpartition(".")
            kinds[parameter].add(kind)
    return dict(kinds)


def run_tensors(state: RankState) -> dict[str, TensorPieces]:
    """Return all tensors of this rank's stages by name; views of live storage, so loading fills the run in place."""
    tensors: dict[str, TensorPieces] = {}
    for buffer in state.buffers:
        elsewhere = _is_written_elsewhere(buffer, state.mesh)
        for name, parameter, _ in _parameters(buffer):
            local, split = parameter.detach(), tensor_split(parameter)
            tensors[f"model.{name}"] = pieces_of_range(
                local.flatten(), 0, local.shape, split, is_replicated=True, is_written_elsewhere=elsewhere
            )
    for kind, buffer, shard in state.optimizer.state_tensors():
        elsewhere, first = _is_written_elsewhere(buffer, state.mesh), state.mesh.data_rank * shard.numel()
        for name, parameter, start in _parameters(buffer):
            low, high = (min(max(at - start, 0), parameter.numel()) for at in (first, first + shard.numel()))
            values = shard[max(start - first, 0) :][: high - low]
            tensors[f"optimizer.{name}.{kind}"] = pieces_of_range(
                values, low, parameter.shape, tensor_split(parameter), is_written_elsewhere=elsewhere
            )
    return tensors


def _parameters(buffer: FlatBuffer) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name in the checkpoint, parameter, its first element in the buffer)."""
    start = 0
    for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
        # A tied head is the embedding; the first stage saves it for both, and both load it.
        yield buffer.tied_name if buffer.tied else name, parameter, start
        start += parameter.numel()


def _is_written_elsewhere(buffer: FlatBuffer, mesh: Mesh) -> bool:
    """By the first rank of the tensor-parallel group, or by the first stage, which has a tied head's matrix."""
    return (mesh.tp_rank > 0 and not buffer.is_part) or (buffer.tied and mesh.is_last_stage)


def tensors_to_write(tensors: dict[str, TensorPieces], mesh: Mesh) -> dict[str, TensorPieces]:
    """Return this rank's part: each replicated tensor goes to the replica with the fewest bytes."""
    assigned_bytes = [0] * mesh.data_size
    mine = {}
    for name, tensor in tensors.items():
        if tensor.is_written_elsewhere:
            continue
        if tensor.is_replicated:
            writer = assigned_bytes.index(min(assigned_bytes))
            assigned_bytes[writer] += tensor.num_bytes
            if writer != mesh.data_rank:
                continue
        mine[name] = tensor
    return mine


def random_tensors(mesh: Mesh) -> dict[str, TensorPieces]:
    """Return copies of this process's random states, uint8, by rank."""
    states = {f"random.{mesh.rank}.cpu": whole_tensor(torch.get_rng_state())}
    if mesh.device.type == "cuda":
        states[f"random.{mesh.rank}.cuda"] = whole_tensor(torch.cuda.get_rng_state(mesh.device))
    return states


def first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


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
    _require_same_steps(path, progress.steps_done, steps_in_name(path), "its name says")
    if progress.loader_digest != hashlib.sha256(loader).hexdigest():
        raise ConfigError(
            f"checkpoint {path} was changed after it was saved: {LOADER_FILE} is not the one that {PROGRESS_FILE} "
            "belongs to; restore both, or remove this checkpoint to go on from the one before"
        )
    coefficients = read_coefficients(path / COST_FILE) if (path / COST_FILE).is_file() else None
    return RunPosition(progress=progress, loader=loader, coefficients=coefficients)


def _require_same_steps(path: Path, steps_done: int, others: int, where: str) -> None:
    if steps_done != others:
        raise ConfigError(
            f"checkpoint {path} was changed after it was saved: {PROGRESS_FILE} tells of {counted(steps_done, 'step')},"
            f" {where} {others}; restore it, or remove this checkpoint to go on from the one before"
        )
