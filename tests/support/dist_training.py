"""A training run as one rank of a `GlooPool`."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from evenload.config.planner import layouts_of
from evenload.config.train_config import load_train_config
from evenload.cost.coefficients import CostCoefficients, OverlapCost, PassCoefficients
from evenload.runtime.checkpoint.checkpoint import run_tensors
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.stages.live_stages import Switch
from evenload.runtime.stages.rank_state import RankState
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.cluster import LinkSpec
from evenload.types.run import LayoutDecision, Validation
from gloo_pool import TIMEOUT_S

COSTS = CostCoefficients(
    source="analytic",
    device="test",
    peak_flops_per_s=1e9,
    forward=PassCoefficients(linear_s_per_token=1e-3, attention_s_per_pair=1e-5, slice_s=1e-5, pack_s=1e-2),
    backward=PassCoefficients(linear_s_per_token=2e-3, attention_s_per_pair=2.5e-5, slice_s=2e-5, pack_s=2e-2),
    head_s_per_token=5e-4,
    p2p_bandwidth_bytes_per_s=1e9,
    p2p_latency_s=1e-5,
    reduce_bandwidth_bytes_per_s=1e9,
    reduce_latency_s=1e-5,
    intra_node=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-5),
    host_link=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-5),
    devices_per_node=64,
    overlap=OverlapCost(),
)
STEEP_COSTS = msgspec.structs.replace(
    COSTS,
    forward=msgspec.structs.replace(COSTS.forward, attention_s_per_pair=1e-4, pack_s=2e-2),
    backward=msgspec.structs.replace(COSTS.backward, attention_s_per_pair=2.5e-4, pack_s=4e-2),
    intra_node=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-6),
    host_link=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0),
    overlap=None,
)
"""Balanced cuts differ between forward and backward, and transfers are cheap enough to share documents."""


class StepMemory(NamedTuple):
    """Of one step: measured and predicted peak, policies of its documents, kinds of its actions, the most ranks
    that share a slice."""

    loss: float
    peak_bytes: int
    predicted_bytes: int
    policies: frozenset[str]
    kinds: frozenset[str]
    most_ranks: int


def memory_steps(config_file: str, overrides: list[str], stop_after: int) -> list[StepMemory]:
    """As `train_steps`."""
    return _train(config_file, overrides, stop_after, _memory)


def _memory(report: StepReport) -> StepMemory:
    plan, row = report.plan, report.row
    policies = {p.policies.get(d.doc_id, "replay") for p in plan.pack_plans for pack in p.forward for d in pack.slices}
    kinds = {action.kind for schedule in plan.schedules for rank in schedule.ranks for action in rank}
    numbers = row["peak_memory_bytes"], row["predicted_peak_memory_bytes"]
    most_ranks = max(piece.cp for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices)
    return StepMemory(row["loss"], *numbers, frozenset(policies), frozenset(kinds), most_ranks)  # type: ignore[arg-type]


def train_steps(config_file: str, overrides: list[str], stop_after: int, export: bool = False) -> list[float]:
    """Resume if there is a checkpoint, train until `stop_after` steps are done, save; losses on rank 0.

    The learning rate follows the configured number of steps, so a run may stop early and go on.
    """
    return _train(config_file, overrides, stop_after, lambda report: report.row["loss"], export)


def trained_rows(config_file: str, overrides: list[str], stop_after: int) -> list[dict]:
    """As `train_steps`, the rows of metrics."""
    return _train(config_file, overrides, stop_after, lambda report: report.row)


class TrainedRun(NamedTuple):
    """Of one rank: its trainer, which has saved, and reports of the steps it did, on rank 0."""

    trainer: Trainer
    reports: list[StepReport]


def make_trainer(config_file: str, overrides: list[str], kind=Trainer, ranks_per_machine: int | None = None):
    config = load_train_config(Path(config_file), overrides)
    layouts = layouts_of(config, model_spec(config).num_layers)
    meshes = create_meshes(layouts, torch.device("cpu"), TIMEOUT_S, ranks_per_machine=ranks_per_machine)
    return kind(config, meshes.start, meshes)


def trained_to(
    stop_after: int, config_file: str, overrides: list[str], memory_cap_bytes: int | None = None
) -> TrainedRun:
    """Resume if there is a checkpoint, train until `stop_after` steps are done, save."""
    trainer = make_trainer(config_file, overrides)
    trainer.resume()
    memory_cap_bytes = memory_cap_bytes or trainer.config.plan.memory_bytes or 2**34
    reports = [report for report in trainer.train(COSTS, memory_cap_bytes, stop_after) if report is not None]
    trainer.save()
    return TrainedRun(trainer, reports)


def _train(config_file: str, overrides: list[str], stop_after: int, of_report, export: bool = False) -> list:
    trainer, reports = trained_to(stop_after, config_file, overrides)
    if export:
        trainer.export()
    return [of_report(report) for report in reports]


class Outcome(NamedTuple):
    """Of a run, on rank 0.

    Args:
        losses, norms, layouts, decisions: by step.
        state: all tensors of a checkpoint at the end, whole.
        num_known: steps after which something is known of layouts.
    """

    losses: list[float]
    norms: list[float]
    layouts: list[str]
    decisions: list[LayoutDecision | None]
    switches: list[Switch]
    validations: list[Validation]
    state: dict[str, np.ndarray]
    num_known: int


def assert_same_training(result: Outcome, expected: Outcome, tolerance: float) -> None:
    """Losses, norms, weights and optimizer state; 0 = to the bit."""
    assert result.losses == pytest.approx(expected.losses, rel=tolerance, abs=0)
    assert result.norms == pytest.approx(expected.norms, rel=10 * tolerance, abs=0)
    assert result.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        difference = np.linalg.norm(result.state[name] - tensor)
        assert difference <= tolerance * max(np.linalg.norm(tensor), 1e-12), name


def run_outcome(config_file: str, overrides: list[str], memory_cap_bytes: int, stop_after: int) -> Outcome | None:
    return outcome_of(*trained_to(stop_after, config_file, overrides, memory_cap_bytes))


def outcome_of(trainer: Trainer, reports: list[StepReport]) -> Outcome | None:
    """None on other ranks. Collective."""
    state = whole_state(trainer.state)
    if trainer.mesh.rank != 0:
        return None
    return Outcome(
        losses=[float(report.row["loss"] or 0.0) for report in reports],
        norms=[float(report.row["grad_norm"] or 0.0) for report in reports],
        layouts=[str(report.row["layout"]) for report in reports],
        decisions=[report.decision for report in reports],
        switches=[report.switch for report in reports if report.switch is not None],
        validations=[report.validation for report in reports if report.validation is not None],
        state=state,
        num_known=len(trainer._layouts_known),
    )


def whole_state(state: RankState) -> dict[str, np.ndarray]:
    """Weights and optimizer state by name, joined from all ranks, whose copies are the same to the bit. Collective."""
    mesh = state.mesh
    mine = {
        name: (tensor.shape, [(at, as_numpy(piece)) for at, piece in tensor.pieces.items()])
        for name, tensor in run_tensors(state).items()
    }
    everyone: list[dict] = [{}] * mesh.num_ranks
    dist.all_gather_object(everyone, mine, group=mesh.control)
    whole: dict[str, np.ndarray] = {}
    known: dict[str, np.ndarray] = {}
    for name, (shape, pieces) in ((name, held) for one in everyone for name, held in one.items()):
        for offsets, local in pieces:
            target = whole.setdefault(name, np.zeros(shape, local.dtype))
            seen = known.setdefault(name, np.zeros(shape, bool))
            place = tuple(slice(start, start + size) for start, size in zip(offsets, local.shape, strict=True))
            assert np.array_equal(target[place][seen[place]], local[seen[place]]), f"copies of {name} differ"
            target[place], seen[place] = local, True
    assert all(seen.all() for seen in known.values())
    return whole


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy; bf16, which numpy does not know, as its bits."""
    tensor = tensor.detach().to("cpu", copy=True)
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
