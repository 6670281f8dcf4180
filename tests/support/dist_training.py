"""A training run as one rank of a `GlooPool`."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from evenload.cost.coefficients import BesideCompute, CostCoefficients, PassCoefficients
from evenload.plan.feedback.measured_factors import rank_work_s
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.config.run_layouts import layouts_of
from evenload.runtime.config.train_config import load_train_config
from evenload.runtime.executor import Executor, RankRun
from evenload.runtime.model.configured import model_spec
from evenload.runtime.replay.rank_packs import RankStep
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.cluster import LinkSpec
from evenload.types.plan import StepPlan
from evenload.types.rank_speeds import RankSpeeds
from gloo_pool import TIMEOUT_S
from speed_cases import action_seconds

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
    small_pack_tokens=0,
    reduction_beside=BesideCompute(),
    gather_beside=BesideCompute(),
)


def shared_steps(config_file: str, overrides: list[str], stop_after: int) -> list[tuple[float, int]]:
    """As `train_steps`; per step the loss and the most ranks that shared a slice."""
    return _train(config_file, overrides, stop_after, lambda report: (report.row["loss"], _most_ranks(report.plan)))


def _most_ranks(plan: StepPlan) -> int:
    return max(piece.cp for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices)


class StepMemory(NamedTuple):
    """Of one step: measured and predicted peak, policies of its documents, kinds of its actions."""

    loss: float
    peak_bytes: int
    predicted_bytes: int
    policies: frozenset[str]
    kinds: frozenset[str]


def memory_steps(config_file: str, overrides: list[str], stop_after: int) -> list[StepMemory]:
    """As `train_steps`; under `plan.memory_bytes` where it is set."""
    return _train(config_file, overrides, stop_after, _memory)


def _memory(report: StepReport) -> StepMemory:
    plan, row = report.plan, report.row
    policies = {p.policies.get(d.doc_id, "replay") for p in plan.pack_plans for pack in p.forward for d in pack.slices}
    kinds = {action.kind for schedule in plan.schedules for rank in schedule.ranks for action in rank}
    numbers = row["peak_memory_bytes"], row["predicted_peak_memory_bytes"]
    return StepMemory(row["loss"], *numbers, frozenset(policies), frozenset(kinds))  # type: ignore[arg-type]


def train_steps(config_file: str, overrides: list[str], stop_after: int, export: bool = False) -> list[float]:
    """Resume if there is a checkpoint, train until `stop_after` steps are done, save; losses on rank 0.

    The learning rate follows the configured number of steps, so a run may stop early and go on.
    """
    return _train(config_file, overrides, stop_after, lambda report: report.row["loss"], export)


class TrainedRun(NamedTuple):
    """Of one rank: its trainer, which has saved, and reports of the steps it did, on rank 0."""

    trainer: Trainer
    reports: list[StepReport]


def trained_to(
    stop_after: int, config_file: str, overrides: list[str], memory_cap_bytes: int | None = None
) -> TrainedRun:
    """Resume if there is a checkpoint, train until `stop_after` steps are done, save; in all layouts of the run."""
    config = load_train_config(Path(config_file), overrides)
    meshes = create_meshes(layouts_of(config, model_spec(config).num_layers), torch.device("cpu"), TIMEOUT_S)
    trainer = Trainer(config, meshes.start, meshes)
    trainer.resume()
    memory_cap_bytes = memory_cap_bytes or config.plan.memory_bytes or 2**34
    reports = [report for report in trainer.train(COSTS, memory_cap_bytes, stop_after) if report is not None]
    trainer.save()
    return TrainedRun(trainer, reports)


def _train(config_file: str, overrides: list[str], stop_after: int, of_report, export: bool = False) -> list:
    trainer, reports = trained_to(stop_after, config_file, overrides)
    if export:
        trainer.export()
    return [of_report(report) for report in reports]


class SpeedStep(NamedTuple):
    """Of one step: its loss, the plan's speeds, each replica's share of the work, and what became known."""

    loss: float
    speeds: RankSpeeds | None
    shares: tuple[float, ...]
    new_speeds: RankSpeeds | None
    speeds_from_step: int


def throttled_steps(config_file: str, overrides: list[str], stop_after: int, true: RankSpeeds) -> list[SpeedStep]:
    """As `train_steps`, where every rank's clock shows what its actions take at these speeds: exactly, so that nothing
    depends on the machine. What is computed, and how clocks are gathered and followed, is the run's own."""
    run = Executor.run

    def clocked_run(self: Executor, step: RankStep, *others: object) -> RankRun:
        done, mesh = run(self, step, *others), self._mesh
        trace = done.trace
        seconds = [
            action_seconds(step.plan, mesh.dp_rank, action.kind, action.stage, action.pack, true)
            for action in step.plan.schedules[mesh.dp_rank].ranks[mesh.pp_rank]
        ]
        ends = trace.start_s[0] + np.cumsum(seconds) if seconds else trace.end_s
        shown = replace(trace, start_s=ends - np.array(seconds), end_s=ends)
        return replace(done, read_trace=lambda: shown)

    Executor.run = clocked_run
    try:
        return _train(config_file, overrides, stop_after, _speed_step)
    finally:
        Executor.run = run


def _speed_step(report: StepReport) -> SpeedStep:
    work_s = rank_work_s(report.plan).sum(axis=1)
    shares = tuple((work_s / work_s.sum()).tolist())
    row_speeds = None if report.plan.speeds is None else report.plan.speeds.describe()
    assert report.row["rank_speeds"] == row_speeds
    return SpeedStep(
        float(report.row["loss"] or 0.0), report.plan.speeds, shares, report.new_speeds, report.speeds_from_step
    )
