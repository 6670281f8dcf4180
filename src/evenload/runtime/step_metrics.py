"""Make a step's `StepReport`: its measured `Timeline` and its row of `metrics.jsonl`.

Each rank's times count from its own exit of the barrier at the step's start, so clocks need not be synchronised. Of
context ranks, which run the same packs together, the timeline shows the one with the most seconds in packs and the
memory of the fullest. Tokens are without padding; FLOPs count useful attention work alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.layer_counts import training_flops
from evenload.runtime.checkpoint.writer import SavedCheckpoint
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.executor import RankTrace
from evenload.runtime.optim.data_parallel import GatherTrace
from evenload.runtime.stages.live_stages import Switch
from evenload.types.cluster import data_sheet_flops_per_s
from evenload.types.model import ModelSpec
from evenload.types.plan import DEFERRED, StepPlan
from evenload.types.run import LayoutDecision, Validation
from evenload.types.timeline import SideTasks, Timeline, pack_times, replica_imbalance, side_tasks
from evenload.types.tree_columns import lengths_of


@dataclass(frozen=True, eq=False, kw_only=True)
class StepReport:
    """Reports a step; made on rank 0.

    Args:
        row: the fixed keys of metrics.jsonl.
        measured: all ranks' timeline.
        ledger_lines: documents and tokens so far.
        saved: the checkpoint that was completed meanwhile.
        failed_save: why one was not, where `train.on_failed_checkpoint` lets training go on.
        switch, decision: the change of the layout before the step, and how it was decided; None where there is none.
        validation: of the weights after the step, where it was due.
    """

    row: dict[str, int | float | str | None]
    plan: StepPlan
    measured: Timeline
    ledger_lines: tuple[str, ...]
    saved: SavedCheckpoint | None = None
    failed_save: str = ""
    warning: str = ""
    switch: Switch | None = None
    decision: LayoutDecision | None = None
    validation: Validation | None = None


@dataclass(frozen=True, kw_only=True)
class RankStepReport:
    """Holds what one rank reports at the end of a step, also whether to stop and to save, so that all decide alike.

    Args:
        barrier_s: of the barrier at the step's start, on the rank's clock.
        peak_bytes: of tensors.
        data_wait_s: that the rank waited for the step before.
        stop_signal: why it is to end after the step; 0 = it is not.
    """

    step_time_s: float
    peak_bytes: int
    data_wait_s: float
    barrier_s: float
    stop_signal: int
    is_time_to_save: bool

    def joined(self, mesh: Mesh) -> "RankStepReport":
        """Return the largest value of any rank of each field, but the shortest barrier. Collective."""
        names = [field.name for field in fields(self)]
        signs = torch.tensor([-1.0 if name == "barrier_s" else 1.0 for name in names], dtype=torch.float64)
        values = signs * torch.tensor([float(getattr(self, name)) for name in names], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mesh.control)
        of_all = zip(names, (values * signs).tolist(), strict=True)
        return RankStepReport(**{name: type(getattr(self, name))(value) for name, value in of_all})


def device_peaks(coefficients: CostCoefficients, model: ModelSpec, num_devices: int) -> tuple[float, float | None]:
    """Return the FLOP/s that matrix products reach on so many devices, and those of the data sheet, if known."""
    sheet = data_sheet_flops_per_s(coefficients.device) if model.bytes_per_element == 2 else None
    return coefficients.peak_flops_per_s * num_devices, sheet and sheet * num_devices


_Spans = dict[str, NDArray[np.float64]]
"""Starts and ends [2, n] of one rank's overlapped transfers and waits by kind, from the step's start."""


def gather_timeline(
    trace: RankTrace,
    sums: NDArray[np.float64],
    gathers: Sequence[GatherTrace],
    *,
    zero_s: float,
    step_time_s: float,
    static_bytes: int,
    mesh: Mesh,
) -> Timeline | None:
    """Join all ranks' traces as one timeline on rank 0, None elsewhere; `zero_s` is this rank's clock at the step's
    start, `gathers` became whole in it. Collective."""
    memory_bytes = trace.memory_bytes + static_bytes
    mine = replace(trace, start_s=trace.start_s - zero_s, end_s=trace.end_s - zero_s, memory_bytes=memory_bytes)
    none, waits = np.zeros((2, 0)), [one.waits for one in gathers]
    overlaps = {"reduction": [sums], "gather": [one.gathers for one in gathers], "weight_wait": waits}
    spans: _Spans = {kind: np.concatenate([none, *parts], axis=1) - zero_s for kind, parts in overlaps.items()}
    own = (mesh.dp_rank, mesh.pp_rank, mine, spans)
    everyone = [own] * mesh.num_ranks
    dist.gather_object(own, everyone if mesh.rank == 0 else None, dst=0, group=mesh.control)
    if mesh.rank != 0:
        return None
    places: dict[tuple[int, int], list[RankTrace]] = defaultdict(list)
    overlapped: dict[tuple[int, int], list[_Spans]] = defaultdict(list)
    holders: dict[int, list[_Spans]] = defaultdict(list)
    for dp_rank, pp_rank, one, of_rank in everyone:
        if pp_rank >= 0:  # not idle
            places[dp_rank, pp_rank].append(one)
            overlapped[dp_rank, pp_rank].append(of_rank)
            holders[mesh.layout.leading_ranks[pp_rank]].append(of_rank)
    parts = [_columns(*place, traces) for place, traces in places.items()]
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    sides = []
    for place, of_place in overlapped.items():
        stage, same = mesh.layout.stages_of_rank(place[1])[0], holders[mesh.layout.leading_ranks[place[1]]]
        sides += [_together(kind, *place, stage, [one[kind] for one in same]) for kind in ("reduction", "gather")]
        waits = max((one["weight_wait"] for one in of_place), key=lambda one: float((one[1] - one[0]).sum()))
        sides.append(side_tasks("weight_wait", place[0], np.full(waits.shape[1], place[1]), stage, -1, *waits))
    names = [field.name for field in fields(SideTasks)]
    side = SideTasks(**{name: np.concatenate([getattr(one, name) for one in sides]) for name in names})
    return Timeline(**joined, step_time_s=step_time_s, side=side)


def _together(kind: str, dp_rank: int, pp_rank: int, stage: int, spans: list[NDArray[np.float64]]) -> SideTasks:
    """Return transfers of ranks with the same layers: one begins when all ranks wait and the one before is done."""
    start_s, end_s = np.maximum.reduce(spans)
    start_s[1:] = np.maximum(start_s[1:], end_s[:-1])
    return side_tasks(kind, dp_rank, np.full(len(end_s), pp_rank), stage, -1, start_s, end_s)


def _columns(dp_rank: int, pp_rank: int, traces: list[RankTrace]) -> dict[str, np.ndarray]:
    busiest = max(traces, key=lambda trace: float((trace.end_s - trace.start_s).sum()))
    count = len(busiest.kind)
    place = {"dp_rank": np.full(count, dp_rank, np.int32), "rank": np.full(count, pp_rank, np.int32)}
    tasks = {name: getattr(busiest, name) for name in ("stage", "kind", "pack", "start_s", "end_s")}
    memory = {f"memory_{name}": column for name, column in place.items()} | {
        "memory_time_s": busiest.end_s,
        "memory_bytes": np.maximum.reduce([trace.memory_bytes for trace in traces]),
    }
    return place | tasks | memory


def no_label_warning(plan: StepPlan) -> str:
    return (
        f"step {plan.step}: none of its {len(plan.documents):,} documents has a token with a loss, so loss and "
        "gradient are 0, and only momentum and weight decay moved the weights; see data.record and data.loss_on"
    )


def step_row(
    plan: StepPlan,
    timeline: Timeline,
    model: ModelSpec,
    *,
    loss: float,
    grad_norm: float,
    learning_rate: float,
    peaks: tuple[float, float | None],
    end: RankStepReport,
    exchange_s: float,
    plan_s: float,
) -> dict[str, int | float | str | None]:
    """Make a step's row of `metrics.jsonl`.

    Args:
        loss: a label token; grad_norm: before clipping.
        peaks: `device_peaks` of all devices of the run together, idle ones included.
        end: of all ranks.
        exchange_s: of the barrier before the step and the exchange of measurements after it; in no prediction.
    """
    lengths, trees = lengths_of(plan.documents)
    tokens = int(lengths.sum())
    path_tokens = tokens + sum(d.num_shared_tokens for d in plan.documents)
    padding = sum(pack.num_padding_tokens for packs in plan.pack_plans for pack in packs.forward)
    flops = float(training_flops(model, lengths, trees).sum())
    reduction_s, reduction_hidden_s = timeline.reduction_seconds()
    gather_s, gather_hidden_s = timeline.gather_seconds()
    step_time_s = timeline.step_time_s + exchange_s
    return {
        "step": plan.step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": learning_rate,
        "tokens": tokens,
        "label_tokens": plan.num_label_tokens,
        "padding_tokens": padding,
        "documents": len(plan.documents),
        "step_time_s": step_time_s,
        "exchange_s": exchange_s,
        "predicted_step_time_s": plan.predicted.step_time_s,
        "reduction_s": reduction_s,
        "reduction_hidden_s": reduction_hidden_s,
        "predicted_reduction_s": plan.predicted.reduction_s,
        "predicted_reduction_hidden_s": plan.predicted.reduction_hidden_s,
        "gather_s": gather_s,
        "gather_hidden_s": gather_hidden_s,
        "predicted_gather_s": plan.predicted.gather_s,
        "predicted_gather_hidden_s": plan.predicted.gather_hidden_s,
        "tokens_per_s": tokens / (step_time_s + end.data_wait_s),
        "path_tokens_per_s": path_tokens / (step_time_s + end.data_wait_s),
        "tree_token_ratio": path_tokens / tokens,
        "recomputed_tokens": sum(d.num_recomputed_tokens for d in plan.documents),
        "mfu": flops / step_time_s / peaks[0],
        "mfu_of_data_sheet": peaks[1] and flops / step_time_s / peaks[1],
        "bubble_fraction": timeline.bubble_fraction(),
        "imbalance_forward": pack_times(timeline, "forward").imbalance(),
        "imbalance_backward": pack_times(timeline, "backward").imbalance(),
        "imbalance_dp": replica_imbalance(timeline),
        "pack_efficiency": tokens / (tokens + padding),
        "plan_time_s": plan_s,
        "plan_cut_short": int(plan.is_cut_short),
        "data_wait_s": end.data_wait_s,
        "peak_memory_bytes": end.peak_bytes,
        "predicted_peak_memory_bytes": plan.predicted.peak_memory_bytes,
        "deferred_documents": sum(left.reason == DEFERRED for left in plan.left_out),
        "mean_token_delay_steps": plan.mean_token_delay_steps,
        "layout": plan.layout.describe(),
    }
