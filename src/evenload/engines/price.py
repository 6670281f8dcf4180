"""`engine_price`: seconds of a step on an engine, in the simulator and by the cost model of Evenload's own runtime.

    StepPlan ─► project ─► packs as the engine pads them ─► seconds ─► its order ─► its waiting ─► its step's end

What is the engine's own: which micro-batches there are and how long they are (`projection`), in which order a pipeline
runs them, whether a rank computes while it sends, whether ranks wait for each other in every micro-batch because
weights are sharded (`pass_transfers`), when gradients are summed and weights gathered, and who updates what. Seconds of
compute are those of Evenload's runtime with all activations stored; docs/engines.md says what that leaves out.

O(documents + micro-batches · stages), a few milliseconds a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import trained_parameters_per_rank
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.engines.head_exchange import with_head_exchange
from evenload.engines.pass_transfers import with_pass_transfers
from evenload.engines.profile import EngineProfile
from evenload.engines.projection import EngineMicroBatch, EngineStep, StepShape, project
from evenload.plan.problem.options import CHOOSE
from evenload.schedule.registry import SCHEDULES
from evenload.simulate.simulate import simulate
from evenload.simulate.step_end import step_end
from evenload.simulate.step_start import SimulatedReplica
from evenload.types.base import Frozen
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.pipeline import PipelineTasks
from evenload.types.plan import StepPlan


class EnginePrice(Frozen):
    """Predicted, of one step on an engine.

    Args:
        step_time_s: `packs_s`, sums of gradients that nothing hides, update, and gather of weights at its end.
        packs_s: until the slowest rank has computed its last micro-batch.
        end_s: of `step_time_s` what comes after.
        idle_fraction: share of all ranks' step time in which no micro-batch is computed.
        padding_fraction: share of the computed tokens that are padding.
        micro_batches: of all data-parallel ranks; empty_micro_batches: of these, without documents.
        max_padded_tokens: of the longest micro-batch.
    """

    step_time_s: float
    packs_s: float
    end_s: float
    idle_fraction: float
    padding_fraction: float
    micro_batches: int
    empty_micro_batches: int
    max_padded_tokens: int


@dataclass(frozen=True, eq=False)
class _Rank:
    """Micro-batches of one rank of the data times context dimension: as packs, and their seconds."""

    columns: SliceColumns
    tasks: PipelineTasks
    is_shared: NDArray[np.bool_]


def engine_price(
    plan: StepPlan,
    profile: EngineProfile,
    costs: PackCosts,
    shape: StepShape | None = None,
    schedule: str = CHOOSE,
) -> EnginePrice:
    """What a plan takes on an engine.

    Args:
        costs: of the plan's model and layout.
        shape: what the run fixes of micro-batches.
        schedule: of the engine's pipeline; "choose" = interleaved where ranks have several stages, else 1F1B.

    Raises:
        ConfigError: the engine cannot run the plan (`project`).
    """
    step = project(plan, profile, shape)
    costs = engine_costs(profile, costs)
    ranks = [_rank(costs, rank) for rank in step.ranks]
    if profile.context_parallel == "heads":
        ranks = [replace(one, tasks=with_head_exchange(costs, one.columns, one.tasks)) for one in ranks]
    busy_s = sum(float(rank.tasks.forward_s.sum() + rank.tasks.backward_s.sum()) for rank in ranks)
    replicas = _as_they_wait(profile, costs, ranks)
    simulated = [_simulated(profile, costs, replica, schedule) for replica in replicas]
    packs_s, end_s = _step_end(profile, costs, simulated)
    step_time_s = packs_s + end_s
    all_s = len(ranks) * costs.layout.pipeline_ranks * step_time_s
    counts = _counts(step, costs.layout)
    return EnginePrice(
        step_time_s=step_time_s,
        packs_s=packs_s,
        end_s=end_s,
        idle_fraction=1.0 - busy_s / all_s if all_s else 0.0,
        padding_fraction=1.0 - _real_tokens(plan) / counts.computed_tokens if counts.computed_tokens else 0.0,
        micro_batches=counts.micro_batches,
        empty_micro_batches=counts.empty_micro_batches,
        max_padded_tokens=counts.max_padded_tokens,
    )


def _step_end(profile: EngineProfile, costs: PackCosts, simulated: Sequence[SimulatedReplica]) -> tuple[float, float]:
    """End of the last micro-batch, and what comes after it."""
    # Weights that are gathered in every pass are in its seconds, and not beside the first packs of a step once more.
    end = step_end(_with_coefficients(costs, overlap_gather=False), simulated)
    end_s = _update_seconds(profile, costs)
    if profile.sums_in(costs.layout) == "step":
        # Beside the last backward, sums make it slower: `summed_s` has that.
        end_s += end.summed_s - end.packs_s
    if profile.weights_in(costs.layout) == "step":
        end_s += end.end_s - end.updated_s
    return end.packs_s, end_s


def engine_costs(profile: EngineProfile, costs: PackCosts) -> PackCosts:
    """The cost model with what the engine hides of transfers, and how far it has to sum."""
    found = costs.coefficients
    changes: dict[str, object] = {}
    if found.source == "analytic":
        changes["tensor_exposed_share"] = 1.0  # as without userbuffers or asynchronous tensor parallelism
    if not profile.timing.sums_beside:
        changes["overlap_reduction"] = False
    if profile.weights_in(costs.layout) != "pass":
        changes["overlap_gather"] = False  # gathered at the end of a step, beside nothing
    if not profile.timing.sharded_update and found.reduce_bandwidth_bytes_per_s is not None:
        # Every rank gets the whole sum: what a reduce-scatter moves, and as much again.
        changes["reduce_bandwidth_bytes_per_s"] = found.reduce_bandwidth_bytes_per_s / 2
        changes["reduce_latency_s"] = 2 * found.reduce_latency_s
    return _with_coefficients(costs, **changes)


def _with_coefficients(costs: PackCosts, **changes: object) -> PackCosts:
    """With other coefficients. Engines cut every document of a shared micro-batch, short ones too."""
    coefficients = msgspec.structs.replace(costs.coefficients, **changes)
    return PackCosts(costs.model, coefficients, costs.layout, keeps_short_whole=False)


def _update_seconds(profile: EngineProfile, costs: PackCosts) -> float:
    if profile.timing.sharded_update:
        return costs.optimizer_seconds()
    most = int(trained_parameters_per_rank(costs.model, costs.layout).max())
    return costs.coefficients.optimizer_s_per_parameter * most


def _rank(costs: PackCosts, micro_batches: Sequence[EngineMicroBatch]) -> _Rank:
    """Padding behind the documents of a micro-batch is a document of its own, which attends to itself."""
    tokens: list[list[int]] = []
    for one in micro_batches:
        rest = one.padded_tokens - sum(one.document_tokens)
        tokens.append([*one.document_tokens, *([rest] if rest else [])])
    sizes = np.array([len(own) for own in tokens], np.int64)
    stop = np.array([length for own in tokens for length in own], np.int64)
    shared = np.array([one.context_ranks for one in micro_batches], np.int64)
    columns = SliceColumns(
        doc=np.arange(len(stop), dtype=np.int32),
        start=np.zeros(len(stop), np.int64),
        stop=stop,
        pack_offset=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        pad_to=np.zeros(len(sizes), np.int64),
        cp=np.repeat(shared, sizes),
    )
    return _Rank(columns, pipeline_tasks(costs, columns, columns, stop), shared > 1)


def _as_they_wait(profile: EngineProfile, costs: PackCosts, ranks: Sequence[_Rank]) -> list[_Rank]:
    """One entry for all ranks that run in step with each other, with the seconds in which they do."""
    layout = costs.layout
    groups = [_in_step(ranks[first : first + layout.cp], layout) for first in range(0, len(ranks), layout.cp)]
    if not profile.waits_in(layout):
        return groups
    # Ranks wait where nothing is pipelined, and there the timing is as it stands.
    moved = [replace(one, tasks=with_pass_transfers(costs, one.columns, one.tasks, profile.timing)) for one in groups]
    slowest = max(moved, key=lambda one: float(one.tasks.forward_s.sum() + one.tasks.backward_s.sum()))
    return [replace(slowest, tasks=_slowest([one.tasks for one in moved]))]


def _in_step(ranks: Sequence[_Rank], layout: ParallelLayout) -> _Rank:
    """The ranks of a context group: they meet in every micro-batch that they share.

    Between two of these each runs its own, so the one with most work there counts; in a pipeline, where others wait for
    every micro-batch, the slowest of each.
    """
    first = ranks[0]
    if len(ranks) == 1 or first.is_shared.all():
        return first
    if layout.num_stages > 1:
        return replace(first, tasks=_slowest([one.tasks for one in ranks]))
    forward_s, backward_s = first.tasks.forward_s.copy(), first.tasks.backward_s.copy()
    edges = np.flatnonzero(np.diff(first.is_shared.astype(np.int8), prepend=2)).tolist()
    for low, high in zip(edges, [*edges[1:], len(first.is_shared)], strict=True):
        work_s = [float((one.tasks.forward_s + one.tasks.backward_s)[low:high].sum()) for one in ranks]
        tasks = ranks[int(np.argmax(work_s))].tasks
        forward_s[low:high], backward_s[low:high] = tasks.forward_s[low:high], tasks.backward_s[low:high]
    return replace(first, tasks=replace(first.tasks, forward_s=forward_s, backward_s=backward_s))


def _slowest(found: Sequence[PipelineTasks]) -> PipelineTasks:
    """Every micro-batch as long as on the rank on which it takes longest."""
    columns = ("forward_s", "backward_s", "p2p_forward_s", "p2p_backward_s")
    return replace(found[0], **{name: np.max([getattr(one, name) for one in found], axis=0) for name in columns})


def _simulated(profile: EngineProfile, costs: PackCosts, one: _Rank, schedule: str) -> SimulatedReplica:
    tasks = _with_sends(profile, costs, one.tasks)
    usual = "interleaved" if costs.layout.num_stages > costs.layout.pp else "1f1b"
    actions = SCHEDULES.named(usual if schedule == CHOOSE else schedule).actions(tasks, None)
    return SimulatedReplica(one.columns, one.columns, tasks, actions, simulate(tasks, actions))


def _with_sends(profile: EngineProfile, costs: PackCosts, tasks: PipelineTasks) -> PipelineTasks:
    """Transfers between stages as the engine makes them."""
    timing = profile.timing
    if costs.layout.num_stages == 1 or not (timing.sends_block or timing.shape_exchange):
        return tasks
    shapes_s = costs.coefficients.p2p_latency_s if timing.shape_exchange else 0.0
    forward_p2p_s, backward_p2p_s = tasks.p2p_forward_s + shapes_s, tasks.p2p_backward_s + shapes_s
    if not timing.sends_block:
        return replace(tasks, p2p_forward_s=forward_p2p_s, p2p_backward_s=backward_p2p_s)
    # The sender's seconds then contain the transfer, and the receiver may begin when they end.
    forward_s, backward_s = tasks.forward_s.copy(), tasks.backward_s.copy()
    forward_s[:, :-1] += forward_p2p_s[:, None]
    backward_s[:, 1:] += backward_p2p_s[:, None]
    nothing = np.zeros_like(forward_p2p_s)
    return replace(
        tasks, forward_s=forward_s, backward_s=backward_s, p2p_forward_s=nothing, p2p_backward_s=nothing.copy()
    )


@dataclass(frozen=True)
class _Counts:
    """What the projection alone tells of a step; fields of `EnginePrice`, and the tokens that are computed."""

    computed_tokens: int
    micro_batches: int
    empty_micro_batches: int
    max_padded_tokens: int


def _counts(step: EngineStep, layout: ParallelLayout) -> _Counts:
    """A micro-batch of a context group counts once, and is empty where all its ranks have no documents."""
    groups = [
        group
        for first in range(0, len(step.ranks), layout.cp)
        for group in zip(*step.ranks[first : first + layout.cp], strict=True)
    ]
    # Ranks of a group have the same documents, or each its own.
    own = [
        one for group in groups for at, one in enumerate(group) if at == 0 or (one.context_ranks == 1 and one.doc_ids)
    ]
    return _Counts(
        computed_tokens=sum(one.padded_tokens for one in own),
        micro_batches=len(groups),
        empty_micro_batches=sum(not any(one.doc_ids for one in group) for group in groups),
        max_padded_tokens=max((one.padded_tokens for one in own), default=0),
    )


def _real_tokens(plan: StepPlan) -> int:
    return sum(document.num_tokens for document in plan.documents)
