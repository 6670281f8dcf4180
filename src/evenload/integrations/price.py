"""`engine_price`: seconds of a step on an engine, by the simulator and the cost model of Evenload's own runtime.

    StepPlan ─► `project`: packs ─► order ─► empty micro-batches ─► padded lengths
             ─► seconds ─► the engine's order ─► its waiting ─► its step's end

A projection trains every document of the plan once, and every rank makes it alike from the plan alone. Compute takes
what Evenload's runtime takes with all activations stored; docs/engines.md lists what is priced and what is not.
O(documents + micro-batches · stages).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import OverlapCost
from evenload.cost.memory import ReplicaPacks, trained_parameters_per_rank
from evenload.cost.pack_cost import PackCosts, weighted
from evenload.cost.pack_pricing import pipeline_tasks
from evenload.cost.units import stage_units, unit_seconds, unit_transfers
from evenload.errors import ConfigError
from evenload.integrations.catalog import EngineProfile, require_layout
from evenload.planning.problem import CHOOSE
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.simulate import simulate
from evenload.schedule.step_collectives import SimulatedReplica, step_end
from evenload.types.base import Frozen
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.document import Direction, PackPlan
from evenload.types.pipeline import PipelineTasks
from evenload.types.plan import StepPlan


class StepShape(Frozen):
    """Holds what a run fixes of a step's micro-batches, in addition to what the engine needs.

    Args:
        micro_batches: of every rank, exactly; None = as many as the plan and the engine need.
        pack_multiple: padded lengths are a multiple of it.
        pack_tokens: length of all micro-batches; None = each its own, or the longest's where an engine's are all equal.
        equal_counts: on all ranks; None = as the engine needs.
    """

    micro_batches: int | None = None
    pack_multiple: int = 1
    pack_tokens: int | None = None
    equal_counts: bool | None = None


class EngineMicroBatch(Frozen, gc=False):
    """Holds what a replica computes in one forward and backward; its context-parallel ranks share all of it. Without
    documents it is padding, whose gradient is 0, and `pack`, the index of the replica's forward pack, is -1.

    Args:
        document_tokens: rows of every document, its own padding included.
        padded_tokens: rows of all documents and of the padding behind them.
    """

    doc_ids: tuple[int, ...] = ()
    document_tokens: tuple[int, ...] = ()
    padded_tokens: int = 0
    pack: int = -1


def project(plan: StepPlan, profile: EngineProfile, shape: StepShape) -> tuple[tuple[EngineMicroBatch, ...], ...]:
    """Return the micro-batches of every replica, in order, as the engine runs them. Raises a `ConfigError` for a plan
    that the engine cannot run, and where `shape` allows too few micro-batches or tokens."""
    require_layout(profile, plan.layout)
    # A context-parallel group shares rows by a multiple of it; a document needs padding only where it is cut itself.
    group_rows = profile.document_chunks * plan.layout.cp if plan.layout.cp > 1 else 1
    chunk = group_rows if profile.context_parallel == "fixed" else 1
    replicas = [_micro_batches(plan, packs, profile, chunk) for packs in plan.pack_plans]
    counts = _counts([len(replica) for replica in replicas], plan, profile, shape)
    longest = max((one.padded_tokens for replica in replicas for one in replica), default=0)
    if shape.pack_tokens is not None and longest > shape.pack_tokens:
        sizes = f"a micro-batch of {longest} tokens, and all have {shape.pack_tokens}"
        raise ConfigError(f"engine {profile.name}: step {plan.step} has {sizes}; lower max_pack_tokens to it")
    least = shape.pack_tokens or (longest if profile.pads_in(plan.layout) else 1)
    multiple = math.lcm(shape.pack_multiple, group_rows)

    def padded(one: EngineMicroBatch) -> EngineMicroBatch:
        tokens = max(1, least, one.padded_tokens)
        return msgspec.structs.replace(one, padded_tokens=-(-tokens // multiple) * multiple)

    return tuple(
        tuple(map(padded, [*replica, *[EngineMicroBatch()] * (count - len(replica))]))
        for replica, count in zip(replicas, counts, strict=True)
    )


def _micro_batches(plan: StepPlan, packs: PackPlan, profile: EngineProfile, chunk: int) -> list[EngineMicroBatch]:
    """Return a replica's micro-batches in order, without the padding behind their documents."""
    _require_whole(plan, packs, profile)
    order = list(range(len(packs.forward)))
    if profile.waits_in(plan.layout):
        # The ranks' first micro-batches wait for each other, then their second: equally long ones belong together.
        times = plan.times[packs.dp_rank]
        order.sort(key=lambda at: -sum(times.forward_s[at]) - sum(times.backward_s[at]))
    micro_batches = []
    for pack in (packs.forward[at] for at in order):
        tokens = tuple(-(-(pack.pad_to or piece.num_tokens) // chunk) * chunk for piece in pack.slices)
        doc_ids = tuple(piece.doc_id for piece in pack.slices)
        at = pack.index if doc_ids else -1
        one = EngineMicroBatch(doc_ids=doc_ids, document_tokens=tokens, padded_tokens=sum(tokens), pack=at)
        micro_batches.append(one)
    return micro_batches


def _require_whole(plan: StepPlan, packs: PackPlan, profile: EngineProfile) -> None:
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    name = f"step {plan.step} of strategy {plan.strategy}"
    for pack in packs.forward:
        for piece in pack.slices:
            if piece.num_tokens != (whole := num_tokens[piece.doc_id]):
                part = f"tokens [{piece.start}, {piece.stop}) of document {piece.doc_id}, which has {whole}"
                profile.refuse("slices", f"{name} holds {part}")
            if piece.cp > plan.layout.cp:
                profile.refuse("sharing", f"{name} shares document {piece.doc_id} among replicas")
        if plan.layout.cp > 1 and isinstance(pack.sharding, tuple) and max(pack.sharding, default=-1) >= 0:
            profile.refuse("mixed_context", f"{name} has documents whole on one rank of a context group")


def _counts(counts: list[int], plan: StepPlan, profile: EngineProfile, shape: StepShape) -> list[int]:
    multiple = profile.count_multiple_in(plan.layout)
    rounded = [-(-count // multiple) * multiple for count in counts]
    if (fixed := shape.micro_batches) is not None:
        if max(rounded) > fixed or fixed % multiple:
            tokens, packs = sum(document.num_tokens for document in plan.documents), fixed * len(counts)
            raise ConfigError(
                f"engine {profile.name}: step {plan.step} needs {max(rounded)} micro-batches on a rank, micro_batches "
                f"is {fixed} and must be a multiple of {multiple} and at least as many. All {packs} must hold {tokens} "
                "tokens, with gaps. Lower batch_tokens, raise max_tokens or micro_batches, or choose auto or best_fit"
            )
        return [fixed] * len(counts)
    is_equal = profile.equal_counts if shape.equal_counts is None else shape.equal_counts
    return [max(rounded)] * len(counts) if is_equal else rounded


class EnginePrice(Frozen):
    """Holds the prediction for one step on an engine.

    Args:
        packs_s: until the slowest rank has computed its last micro-batch.
        end_s: for what comes after: reductions that nothing hides, update, all-gather of weights.
        idle_fraction: share of all ranks' step time in which no micro-batch is computed.
        padding_fraction: share of the computed tokens that are padding.
        micro_batches, empty_micro_batches: counts over all replicas; the latter have no documents.
    """

    step_time_s: float
    packs_s: float
    end_s: float
    idle_fraction: float
    padding_fraction: float
    micro_batches: int
    empty_micro_batches: int
    max_padded_tokens: int


class _Replica(NamedTuple):
    columns: SliceColumns
    tasks: PipelineTasks


def engine_price(
    plan: StepPlan, profile: EngineProfile, costs: PackCosts, shape: StepShape | None = None, schedule: str = CHOOSE
) -> EnginePrice:
    """Predict what a plan takes on an engine, by costs of its model and layout; raises as `project`. `schedule` is of
    the engine's pipeline; "choose" = interleaved where ranks have several stages, else 1F1B."""
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
    known, changes = costs.coefficients, dict[str, object]()
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
    return PackCosts(costs.model, msgspec.structs.replace(costs.coefficients, **changes), costs.layout)


def _replica(profile: EngineProfile, costs: PackCosts, micro_batches: Sequence[EngineMicroBatch]) -> _Replica:
    # Padding behind the documents of a micro-batch is a document of its own, which attends to itself.
    rests = [one.padded_tokens - sum(one.document_tokens) for one in micro_batches]
    tokens = [[*one.document_tokens, *[rest] * (rest > 0)] for one, rest in zip(micro_batches, rests, strict=True)]
    number, num_tokens = itertools.count(), np.array(list(itertools.chain.from_iterable(tokens)), np.int64)
    columns = whole_document_columns([[next(number) for _ in own] for own in tokens], num_tokens, costs.layout.cp)
    tasks = pipeline_tasks(costs, ReplicaPacks(columns, columns, num_tokens))
    if profile.context_parallel == "heads" and costs.layout.cp > 1 and columns.num_packs:
        forward_s, backward_s = (_shared_heads_seconds(costs, columns, way) for way in ("forward", "backward"))
        tasks = replace(tasks, forward_s=forward_s, backward_s=backward_s)
    return _Replica(columns, tasks)


def _slowest(profile: EngineProfile, costs: PackCosts, replicas: Sequence[_Replica]) -> _Replica:
    """Join replicas that wait for each other in every micro-batch to one that takes the longest of each."""
    moved = [one._replace(tasks=_with_pass_transfers(costs, *one, profile)) for one in replicas]
    slowest = max(moved, key=lambda one: float(one.tasks.forward_s.sum() + one.tasks.backward_s.sum()))
    columns = ("forward_s", "backward_s", "p2p_forward_s", "p2p_backward_s")
    longest = {name: np.max([getattr(one.tasks, name) for one in moved], axis=0) for name in columns}
    return slowest._replace(tasks=replace(moved[0].tasks, **longest))


def _simulated(profile: EngineProfile, costs: PackCosts, one: _Replica, schedule: str) -> SimulatedReplica:
    (columns, tasks), layout = one, costs.layout
    if profile.blocking_sends and layout.num_stages > 1:
        # A sender computes for as long as it sends, the shape first; the receiver may begin when that ends.
        shapes_s = costs.coefficients.p2p_latency_s
        forward_s, backward_s = tasks.forward_s.copy(), tasks.backward_s.copy()
        forward_s[:, :-1] += (tasks.p2p_forward_s + shapes_s)[:, None]
        backward_s[:, 1:] += (tasks.p2p_backward_s + shapes_s)[:, None]
        no_s = np.zeros(columns.num_packs)
        tasks = replace(tasks, forward_s=forward_s, backward_s=backward_s, p2p_forward_s=no_s, p2p_backward_s=no_s)
    usual = "interleaved" if layout.num_stages > layout.pp else "1f1b"
    actions = SCHEDULES.named(usual if schedule == CHOOSE else schedule).actions(tasks, None)
    return SimulatedReplica(ReplicaPacks(columns, columns, columns.stop), tasks, actions, simulate(tasks, actions))


def _step_end(profile: EngineProfile, costs: PackCosts, simulated: Sequence[SimulatedReplica]) -> tuple[float, float]:
    """Return the end of the last micro-batch, and the seconds of what comes after it."""
    # Weights gathered in every pass are in its seconds, and not once more at the first packs of a step.
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


def _with_pass_transfers(
    costs: PackCosts, columns: SliceColumns, tasks: PipelineTasks, profile: EngineProfile
) -> PipelineTasks:
    """Add to each pass the all-gathers and reductions of its units that compute does not hide (FSDP2, ZeRO-3).

        forward    gather   0 | 1   | 2     | 3            backward   gather   3 | 2   | 1     | 0
                   compute    | 0   | 1     | 2   | 3                 compute    | 3   | 2     | 1     | 0
                                                                      reduce           | 3     | 2     | 1   | 0

    The gather of the next unit and the reduction of the last one overlap a unit's compute, one after the other.
    """
    if not columns.num_packs:
        return tasks
    features = costs.features.of_packs(columns)
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
        pass_s = np.full(len(pack_s), gathers_s[0] + reductions_s[-1])
        overlapping = zip([*gathers_s[1:], 0.0], [0.0, *reductions_s[:-1]], strict=True)
        for at, (next_s, last_s) in enumerate(overlapping):
            transfers = (next_s, coefficients.gather_overlap), (last_s, coefficients.reduction_overlap)
            pass_s += overlapped_seconds(unit_s[:, at], transfers)
        return pass_s

    forward_s = seconds("forward", stage_units(costs, 0, "forward"), tasks.forward_s[:, 0])
    backward_s = seconds("backward", stage_units(costs, 0), tasks.backward_s[:, 0])
    return replace(tasks, forward_s=forward_s[:, None], backward_s=backward_s[:, None])


def _unit_gathers(costs: PackCosts) -> dict[int, float]:
    """Return the seconds that gather all weights of a unit of the one stage, trained or not, by the unit's number."""
    model, gather_s = costs.model, {}
    # First as if all were trained, without adapters; then the adapters.
    kinds = tuple(msgspec.structs.replace(kind, adapter_parameters=0) for kind in model.kinds)
    whole = msgspec.structs.replace(model, kinds=kinds)
    for spec in (whole, model) if model.has_adapters else (whole,):
        transfers = unit_transfers(spec, costs.coefficients, costs.layout, 0)
        for unit, seconds in zip(transfers.unit.tolist(), transfers.gather_s.tolist(), strict=True):
            gather_s[unit] = gather_s.get(unit, 0.0) + seconds
    return gather_s


def _bucket_reductions(costs: PackCosts, bucket_parameters: int) -> dict[int, float]:
    """Return the seconds that reduce a bucket of gradients, by the last of its units in a backward.

    A bucket is reduced when the next unit does not fit into it (DeepSpeed's `reduce_bucket_size`; 0 = unit by unit),
    the last one at the end. Each unit's latencies stay in it.
    """
    transfers = unit_transfers(costs.model, costs.coefficients, costs.layout, 0)
    sum_s = dict(zip(transfers.unit.tolist(), transfers.sum_s.tolist(), strict=True))
    parameters = dict(zip(transfers.unit.tolist(), transfers.parameters.tolist(), strict=True))
    reduce_s: dict[int, float] = {}
    held, held_s = 0, 0.0
    units = [unit for unit in stage_units(costs, 0) if unit in sum_s]
    for unit, after in itertools.zip_longest(units, units[1:]):
        held, held_s = held + parameters[unit], held_s + sum_s[unit]
        if after is None or held + parameters[after] > bucket_parameters:
            reduce_s[unit], held, held_s = held_s, 0, 0.0
    return reduce_s


def overlapped_seconds(
    compute_s: NDArray[np.float64], transfers: Sequence[tuple[float, OverlapCost | None]]
) -> NDArray[np.float64]:
    """Return when compute and transfers that begin together have all ended, the transfers one after the other.

    Args:
        compute_s: float64[n], without transfers.
        transfers: seconds without compute, and what overlapping costs; None, or where it does not pay: compute waits.
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
    """Return the seconds of every pack whose ranks share heads (Ulysses); float64[num_packs, P].

    A rank computes its share of tokens and of attention, and the whole fixed costs of documents and packs. On every
    layer, overlapped with nothing: all-to-alls, each of which sends (n-1)/n of what a rank has over its link, and in
    forward an all-gather of positions.
    """
    model, layout = costs.model, costs.layout
    ranks = layout.cp
    features = costs.features.of_packs(replace(columns, cp=np.ones_like(columns.cp)))
    features[:, 0] /= ranks
    features[:, 3:] /= ranks
    on_device_s = weighted(features, costs.stage_seconds[direction])
    compute_s = np.maximum(on_device_s, weighted(features[:, 1:3], costs.host_seconds[direction]))
    link = costs.coefficients.group_link(ranks, stride=layout.tp)
    # Heads of a tensor-parallel rank; those of keys and values are repeated until each rank of the group has one.
    token_bytes = max(
        (one.head_dim + one.value_dim) * (one.heads / layout.tp + max(one.kv_heads / layout.tp, ranks))
        for one in model.attentions
    )
    token_bytes *= model.bytes_per_element / ranks
    hops = float(_ALL_TO_ALLS)
    if direction == "forward":
        token_bytes += _POSITION_BYTES
        hops += ranks - 1
    sent_bytes = columns.pack_sums(columns.slice_tokens()) * token_bytes * (ranks - 1) / ranks
    exchange_s = model.num_layers * (sent_bytes / link.bandwidth_bytes_per_s + hops * link.latency_s)
    return compute_s + exchange_s[:, None]
