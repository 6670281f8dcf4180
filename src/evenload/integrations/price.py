"""`engine_price`: seconds of a step on an engine, by the simulator and the cost model of Evenload's own runtime.

    StepPlan ─► project ─► packs as the engine pads them ─► seconds ─► its order ─► its waiting ─► its step's end

What is the engine's own: micro-batches and their lengths (`projection`), the order in which a pipeline runs them,
whether a rank computes while it sends, whether ranks wait for each other in every micro-batch, when gradients are
reduced and weights gathered, and who updates what. Seconds of compute are those of Evenload's runtime with all
activations stored; docs/engines.md lists what that leaves out. O(documents + micro-batches · stages).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import OverlapCost
from evenload.cost.memory import ReplicaPacks, trained_parameters_per_rank
from evenload.cost.pack_cost import PackCosts, weighted
from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.cost.units import pack_features, stage_units, unit_seconds, unit_transfers
from evenload.integrations.engine_profile import EngineProfile
from evenload.integrations.projection import EngineMicroBatch, StepShape, project
from evenload.plan.problem import CHOOSE
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.simulate import simulate
from evenload.schedule.step_ends import SimulatedReplica, step_end
from evenload.types.base import Frozen
from evenload.types.columns import SliceColumns
from evenload.types.document import Direction
from evenload.types.pipeline import PipelineTasks
from evenload.types.plan import StepPlan


class EnginePrice(Frozen):
    """Holds the prediction for one step on an engine.

    Args:
        step_time_s: `packs_s` and `end_s`.
        packs_s: until the slowest rank has computed its last micro-batch.
        end_s: what comes after: reductions that nothing hides, update, gather of weights.
        idle_fraction: share of all ranks' step time in which no micro-batch is computed.
        padding_fraction: share of the computed tokens that are padding.
        micro_batches, empty_micro_batches: of all replicas; of these, without documents.
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
class _Replica:
    columns: SliceColumns
    tasks: PipelineTasks


def engine_price(
    plan: StepPlan, profile: EngineProfile, costs: PackCosts, shape: StepShape | None = None, schedule: str = CHOOSE
) -> EnginePrice:
    """Predict what a plan takes on an engine.

    Args:
        costs: of the plan's model and layout.
        shape: what the run fixes of micro-batches; None = nothing.
        schedule: of the engine's pipeline; "choose" = interleaved where ranks have several stages, else 1F1B.

    Raises:
        ConfigError: the engine cannot run the plan (`project`).
    """
    projected = project(plan, profile, shape or StepShape())
    costs, layout = engine_costs(profile, costs), costs.layout
    replicas = [_replica(profile, costs, micro_batches) for micro_batches in projected]
    busy_s = sum(float(one.tasks.forward_s.sum() + one.tasks.backward_s.sum()) for one in replicas)
    running = [_slowest(profile, costs, replicas)] if profile.waits_in(layout) else replicas
    packs_s, end_s = _step_end(profile, costs, [_simulated(profile, costs, one, schedule) for one in running])
    all_s = len(replicas) * layout.pipeline_ranks * (packs_s + end_s)
    every = list(itertools.chain.from_iterable(projected))
    real_tokens = sum(document.num_tokens for document in plan.documents)
    computed_tokens = sum(one.padded_tokens for one in every)
    return EnginePrice(
        step_time_s=packs_s + end_s,
        packs_s=packs_s,
        end_s=end_s,
        idle_fraction=1.0 - busy_s / all_s if all_s else 0.0,
        padding_fraction=1.0 - real_tokens / computed_tokens if computed_tokens else 0.0,
        micro_batches=len(every),
        empty_micro_batches=sum(not one.doc_ids for one in every),
        max_padded_tokens=max((one.padded_tokens for one in every), default=0),
    )


def engine_costs(profile: EngineProfile, costs: PackCosts) -> PackCosts:
    """Return the cost model with what the engine hides of transfers, and how far it has to reduce."""
    known = costs.coefficients
    changes: dict[str, object] = {}
    if known.source == "analytic":
        changes["tensor_exposed_share"] = 1.0  # as without userbuffers or asynchronous tensor parallelism
    if not profile.overlaps_reduction:
        changes["overlap_reduction"] = False
    if profile.gathers_in(costs.layout) != "pass":
        changes["overlap_gather"] = False  # gathered at the end of a step, when nothing computes
    if not profile.sharded_update and known.reduce_bandwidth_bytes_per_s is not None:
        # Every rank gets the whole sum: what a reduce-scatter moves, and as much again.
        changes["reduce_bandwidth_bytes_per_s"] = known.reduce_bandwidth_bytes_per_s / 2
        changes["reduce_latency_s"] = 2 * known.reduce_latency_s
    return _with_coefficients(costs, **changes)


def _with_coefficients(costs: PackCosts, **changes: object) -> PackCosts:
    """With other coefficients. Engines cut every document of a shared micro-batch, short ones too."""
    coefficients = msgspec.structs.replace(costs.coefficients, **changes)
    return PackCosts(costs.model, coefficients, costs.layout, keeps_short_whole=False)


def _replica(profile: EngineProfile, costs: PackCosts, micro_batches: Sequence[EngineMicroBatch]) -> _Replica:
    # Padding behind the documents of a micro-batch is a document of its own, which attends to itself.
    rests = [one.padded_tokens - sum(one.document_tokens) for one in micro_batches]
    tokens = [[*one.document_tokens, *[rest] * (rest > 0)] for one, rest in zip(micro_batches, rests, strict=True)]
    sizes = np.array([len(own) for own in tokens], np.int64)
    stop = np.array(list(itertools.chain.from_iterable(tokens)), np.int64)
    columns = SliceColumns(
        doc=np.arange(len(stop), dtype=np.int32),
        start=np.zeros(len(stop), np.int64),
        stop=stop,
        pack_offset=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        pad_to=np.zeros(len(sizes), np.int64),
        cp=np.full(len(stop), costs.layout.cp, np.int64),
    )
    tasks = pipeline_tasks(costs, ReplicaPacks(columns, columns, stop))
    if profile.context_parallel == "heads" and costs.layout.cp > 1 and columns.num_packs:
        tasks = replace(
            tasks,
            forward_s=_shared_heads_seconds(costs, columns, "forward"),
            backward_s=_shared_heads_seconds(costs, columns, "backward"),
        )
    return _Replica(columns, tasks)


def _slowest(profile: EngineProfile, costs: PackCosts, replicas: Sequence[_Replica]) -> _Replica:
    """All replicas that wait for each other in every micro-batch, as one that takes the longest of each."""
    moved = [replace(one, tasks=_with_pass_transfers(costs, one.columns, one.tasks, profile)) for one in replicas]
    slowest = max(moved, key=lambda one: float(one.tasks.forward_s.sum() + one.tasks.backward_s.sum()))
    columns = ("forward_s", "backward_s", "p2p_forward_s", "p2p_backward_s")
    longest = {name: np.max([getattr(one.tasks, name) for one in moved], axis=0) for name in columns}
    return replace(slowest, tasks=replace(moved[0].tasks, **longest))


def _simulated(profile: EngineProfile, costs: PackCosts, one: _Replica, schedule: str) -> SimulatedReplica:
    tasks, layout = one.tasks, costs.layout
    if profile.blocking_sends and layout.num_stages > 1:
        # The sender's seconds contain the transfer and that of its shape; the receiver may begin when they end.
        shapes_s = costs.coefficients.p2p_latency_s
        forward_s, backward_s = tasks.forward_s.copy(), tasks.backward_s.copy()
        forward_s[:, :-1] += (tasks.p2p_forward_s + shapes_s)[:, None]
        backward_s[:, 1:] += (tasks.p2p_backward_s + shapes_s)[:, None]
        sends = {
            "p2p_forward_s": np.zeros_like(tasks.p2p_forward_s),
            "p2p_backward_s": np.zeros_like(tasks.p2p_backward_s),
        }
        tasks = replace(tasks, forward_s=forward_s, backward_s=backward_s, **sends)
    usual = "interleaved" if layout.num_stages > layout.pp else "1f1b"
    actions = SCHEDULES.named(usual if schedule == CHOOSE else schedule).actions(tasks, None)
    return SimulatedReplica(one.columns, one.columns, tasks, actions, simulate(tasks, actions))


def _step_end(profile: EngineProfile, costs: PackCosts, simulated: Sequence[SimulatedReplica]) -> tuple[float, float]:
    """End of the last micro-batch, and what comes after it."""
    # Weights that are gathered in every pass are in its seconds, and not once more at the first packs of a step.
    end = step_end(_with_coefficients(costs, overlap_gather=False), simulated)
    if profile.sharded_update:
        end_s = costs.optimizer_seconds()
    else:
        most = int(trained_parameters_per_rank(costs.model, costs.layout).max())
        end_s = costs.coefficients.optimizer_s_per_parameter * most
    if profile.reduces_in(costs.layout) == "step":
        # Overlapped with the last backward, reductions make it slower: `summed_s` has that.
        end_s += end.summed_s - end.packs_s
    if profile.gathers_in(costs.layout) == "step":
        end_s += end.end_s - end.updated_s
    return end.packs_s, end_s


# Weights gathered and gradients reduced in every pass (FSDP2, ZeRO-3):
#
#     forward    gather   0 | 1   | 2     | 3            backward   gather   3 | 2   | 1     | 0
#                compute    | 0   | 1     | 2   | 3                 compute    | 3   | 2     | 1     | 0
#                                                                   reduce           | 3     | 2     | 1   | 0
#
# The gather of the next unit and the reduction of the one before overlap a unit's compute, one after the other; nothing
# hides the first gather of a pass and the last reduction of a backward. All weights of a unit are gathered, those too
# that LoRA does not train; gradients are of trained ones only.


def _with_pass_transfers(
    costs: PackCosts, columns: SliceColumns, tasks: PipelineTasks, profile: EngineProfile
) -> PipelineTasks:
    if not columns.num_packs:
        return tasks
    features = pack_features(costs, [(columns, pack) for pack in range(columns.num_packs)])
    gather_s = _unit_gathers(costs) if profile.gathers == "pass" else {}
    reduce_s = _bucket_reductions(costs, profile.reduction_bucket) if profile.reduces == "pass" else {}
    coefficients = costs.coefficients

    def seconds(direction: Direction, units: list[int], pack_s: NDArray[np.float64]) -> NDArray[np.float64]:
        unit_s = unit_seconds(costs, features, units, direction)
        total_s = unit_s.sum(axis=1)
        # A pack's seconds hold what its units' do not: those of the host, and of policies.
        unit_s *= np.divide(pack_s, total_s, out=np.ones_like(pack_s), where=total_s > 0)[:, None]
        gathers_s = [gather_s.get(unit, 0.0) for unit in units]
        reductions_s = [reduce_s.get(unit, 0.0) if direction == "backward" else 0.0 for unit in units]
        found = np.full(len(pack_s), gathers_s[0] + reductions_s[-1])
        overlapping = zip([*gathers_s[1:], 0.0], [0.0, *reductions_s[:-1]], strict=True)
        for at, (next_s, last_s) in enumerate(overlapping):
            transfers = (next_s, coefficients.gather_overlap), (last_s, coefficients.reduction_overlap)
            found += overlapped_seconds(unit_s[:, at], transfers)
        return found

    forward_s = seconds("forward", stage_units(costs, 0, "forward"), tasks.forward_s[:, 0])
    backward_s = seconds("backward", stage_units(costs, 0), tasks.backward_s[:, 0])
    return replace(tasks, forward_s=forward_s[:, None], backward_s=backward_s[:, None])


def _unit_gathers(costs: PackCosts) -> dict[int, float]:
    """Seconds in which all weights of each unit of the one stage are gathered, by the unit's number."""
    model, found = costs.model, {}
    # As if all were trained: what a unit holds without its adapters; then the adapters.
    whole = msgspec.structs.replace(model, adapter_parameters_per_layer=0)
    for spec in (whole, model) if model.adapter_parameters_per_layer else (whole,):
        transfers = unit_transfers(spec, costs.coefficients, costs.layout, 0)
        for unit, seconds in zip(transfers.unit.tolist(), transfers.gather_s.tolist(), strict=True):
            found[unit] = found.get(unit, 0.0) + seconds
    return found


def _bucket_reductions(costs: PackCosts, bucket_parameters: int) -> dict[int, float]:
    """Seconds in which gradients are reduced, at the unit of a bucket that comes last in a backward.

    A bucket is reduced when the next unit does not fit into it (DeepSpeed's `reduce_bucket_size`), and what is left
    after the last one's backward. Each unit's own latencies stay in it. 0 = unit by unit.
    """
    transfers = unit_transfers(costs.model, costs.coefficients, costs.layout, 0)
    sum_s = dict(zip(transfers.unit.tolist(), transfers.sum_s.tolist(), strict=True))
    parameters = dict(zip(transfers.unit.tolist(), transfers.parameters.tolist(), strict=True))
    found: dict[int, float] = {}
    held, held_s = 0, 0.0
    units = [unit for unit in stage_units(costs, 0) if unit in sum_s]
    for unit, after in itertools.zip_longest(units, units[1:]):
        held, held_s = held + parameters[unit], held_s + sum_s[unit]
        if after is None or held + parameters[after] > bucket_parameters:
            found[unit] = held_s
            held, held_s = 0, 0.0
    return found


def overlapped_seconds(
    compute_s: NDArray[np.float64], transfers: Sequence[tuple[float, OverlapCost | None]]
) -> NDArray[np.float64]:
    """Return when compute and transfers that begin together have all ended, the transfers one after the other.

    Args:
        compute_s: float64[n], alone.
        transfers: seconds alone, and what each and compute cost each other; None, or where overlapping does not pay:
            compute waits for it.
    """
    left_s, now_s = compute_s.copy(), np.zeros_like(compute_s)
    for transfer_s, overlap in transfers:
        if overlap is None or not overlap.pays:
            now_s += transfer_s
            continue
        rate, stretched_s = 1 - overlap.compute_slowdown, transfer_s * overlap.communication_slowdown
        if not rate:
            now_s += stretched_s
            continue
        # The transfer ends first, and compute goes on; or compute ends first, and the transfer alone.
        ends_first = stretched_s * rate <= left_s
        compute_first_s = left_s / rate + transfer_s - left_s / rate / overlap.communication_slowdown
        now_s += np.where(ends_first, stretched_s, compute_first_s)
        left_s = np.where(ends_first, left_s - stretched_s * rate, 0.0)
    return now_s + left_s


_ALL_TO_ALLS = 4
"""Of a layer in each direction: queries, keys, values and output, or their gradients."""
_POSITION_BYTES = 8


def _shared_heads_seconds(costs: PackCosts, columns: SliceColumns, direction: Direction) -> NDArray[np.float64]:
    """Seconds of every pack whose ranks share heads (Ulysses); float64[num_packs, P].

    A rank computes its share of tokens and of whole documents' attention, and all that a document and a pack take
    anyhow. On every layer, overlapped with nothing, as DeepSpeed waits for each (`UlyssesSPAttentionHF`): all-to-alls,
    each of which sends (n-1)/n of what a rank has over its link, and in forward an all-gather of positions. Key heads
    are repeated until every rank has one. Across nodes an all-to-all takes more of the network than a ring, which is
    not priced.
    """
    model, layout = costs.model, costs.layout
    ranks = layout.cp
    features = costs.features.of_packs(replace(columns, cp=np.ones_like(columns.cp)))
    features[:, 0] /= ranks
    features[:, 3:] /= ranks
    on_device_s = weighted(features, costs.stage_seconds[direction])
    compute_s = np.maximum(on_device_s, weighted(features[:, 1:3], costs.host_seconds[direction]))
    link = costs.coefficients.group_link(ranks, stride=layout.tp)
    # Heads of a tensor-parallel rank; those of keys and values at least one for each rank of the group.
    queries = model.num_heads / layout.tp
    keys = max(model.num_kv_heads / layout.tp, ranks)
    token_bytes = 2 * (queries + keys) * model.head_dim * model.bytes_per_element / ranks
    hops = float(_ALL_TO_ALLS)
    if direction == "forward":
        token_bytes += _POSITION_BYTES
        hops += ranks - 1
    sent_bytes = columns.pack_sums(columns.slice_tokens()) * token_bytes * (ranks - 1) / ranks
    exchange_s = model.num_layers * (sent_bytes / link.bandwidth_bytes_per_s + hops * link.latency_s)
    return compute_s + exchange_s[:, None]
