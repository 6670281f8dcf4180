"""Compute what is shown of a chosen plan: its timeline in detail, its step time by cause, and seconds of packs as
measured.

`detailed_timeline` adds to the simulation the critical path, recomputed fronts of backwards, copies to and from the
host, transfers between stages, reductions, gathers and the update (`schedule.step_collectives`), and memory by kind.

`split_step_time` splits the mean device's step time by cause, exactly: busy time by `cost.pack_pricing`, idle time by
`split_bubble`, then waiting for the slowest replica, and the end of the step. O(slices + actions) numpy.

An action starts when its last input is there, from the action before it on its rank or from the neighbour stage (its
binding predecessor; of two at the same time the one of its rank). Followed back from the last end they are the critical
path, whose seconds add up to the makespan to the last bit. No graph is built.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import ReplicaPacks, bytes_by_kind
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import PackSplit, gather_seconds, split_pack_seconds
from evenload.planning.planner import Proposal
from evenload.planning.problem import Candidate, ReplicaChoice
from evenload.schedule.simulate import Simulation, join_timelines, memory_ledger, simulate, to_timeline
from evenload.schedule.step_collectives import SimulatedReplica, StepEnd, step_end
from evenload.stepplan.cp_rows import ranked_if_shared
from evenload.stepplan.resimulation import replica_columns, tasks_of_columns
from evenload.types.columns import SliceColumns
from evenload.types.document import Direction, PackSharding
from evenload.types.layout import ParallelLayout
from evenload.types.pipeline import ActionColumns, PipelineTasks, action_columns
from evenload.types.plan import PackTimes, StepPlan
from evenload.types.timeline import KINDS, SideTasks, Timeline, TimeSplit, joined, side_tasks


def _binding_predecessors(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> NDArray[np.int64]:
    """Return the action that each one waited for last, -1 = none; int64[n]."""
    count = len(actions.kind)
    source = np.arange(-1, count - 1, dtype=np.int64)
    source[actions.rank_offset[:-1][np.diff(actions.rank_offset) > 0]] = -1
    free_s = np.where(source >= 0, simulation.end_s[source], 0.0) if count else np.zeros(0)
    producer = _producers(tasks, actions)
    arrives = np.flatnonzero((producer >= 0) & ((simulation.start_s > free_s) | (source < 0)))
    source[arrives] = producer[arrives]
    return source


def critical_path(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> NDArray[np.int64]:
    """Return the actions that set a replica's makespan, as indices into the action columns, first to last; int64[k]. It
    is the path that ends last; of equal ends the one on the lowest rank."""
    source = _binding_predecessors(tasks, actions, simulation)
    path: list[int] = []
    at = int(simulation.end_s.argmax()) if len(simulation.end_s) else -1
    while at >= 0:
        path.append(at)
        at = int(source[at])
    return np.array(path[::-1], np.int64)


def _producers(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.int64]:
    """Return the neighbour stage's action that feeds each action; int64[n], -1 where there is none."""
    most_packs = max(tasks.num_forward, tasks.num_backward)
    # A border around the stages stands for "no neighbour".
    place = np.full((3, most_packs, tasks.num_stages + 2), -1, np.int64)
    direction = np.array([0, 1, 1, 2])[actions.kind]  # I stands for B; W is fed by its own stage
    place[direction, actions.pack, actions.stage + 1] = np.arange(len(actions.kind))
    neighbour = actions.stage + np.where(direction == 0, 0, 2)
    return np.where(direction == 2, -1, place[direction, actions.pack, neighbour])


def p2p_transfers(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return all transfers between stages as (producer, consumer, start, end); int64[h] actions and float64[h] seconds.
    Those of one link do not queue behind each other."""
    producer = _producers(tasks, actions)
    consumer = np.flatnonzero(producer >= 0)
    start_s = simulation.end_s[producer[consumer]]
    end_s, pack, is_forward = start_s.copy(), actions.pack[consumer], actions.kind[consumer] == KINDS.index("F")
    end_s[is_forward] += tasks.p2p_forward_s[pack[is_forward]]
    end_s[~is_forward] += tasks.p2p_backward_s[pack[~is_forward]]
    return producer[consumer], consumer, start_s, end_s


class Bubble(NamedTuple):
    """Idle seconds summed over ranks, none negative; with busy time they add up to ranks * makespan.

    Args:
        warmup_s: before a rank's first action (p2p and imbalance included).
        cooldown_s: after its last action; the whole makespan of a rank without actions.
        p2p_s: transfers in the chains of actions that a rank waited for in a gap.
        dependency_s: what it would wait too if all actions of a kind took their mean: the price of the order.
        stage_imbalance_s: what it would wait beyond that if packs were equal and stages were not.
        imbalance_s: the rest, of packs.
    """

    warmup_s: float
    cooldown_s: float
    p2p_s: float
    dependency_s: float
    stage_imbalance_s: float
    imbalance_s: float


def split_bubble(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> Bubble:
    """Split the idle time of a simulated schedule by cause, with two more simulations."""
    start, end = simulation.start_s, simulation.end_s
    first = actions.rank_offset[:-1]
    last = actions.rank_offset[1:] - 1
    used = last >= first
    p2p_s, waiting_s = _gaps(tasks, actions, simulation)
    # Seconds that each rank would wait if packs were equal, and if stages were equal too.
    of_stages_s, of_order_s = (
        _gaps(even, actions, simulate(even, actions))[1] if waiting_s.any() else waiting_s
        for even in (_with_mean_seconds(tasks, (0,)), _with_mean_seconds(tasks, (0, 1)))
    )
    dependency_s = np.minimum(waiting_s, of_order_s)
    stage_imbalance_s = np.maximum(0.0, np.minimum(waiting_s, of_stages_s) - dependency_s)
    return Bubble(
        warmup_s=float(start[first[used]].sum()),
        cooldown_s=float((simulation.makespan_s - end[last[used]]).sum()) + simulation.makespan_s * int((~used).sum()),
        p2p_s=float(p2p_s.sum()),
        dependency_s=float(dependency_s.sum()),
        stage_imbalance_s=float(stage_imbalance_s.sum()),
        imbalance_s=float((waiting_s - dependency_s - stage_imbalance_s).sum()),
    )


def _gaps(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of transfers and of actions in the chains that ranks waited for in gaps; float64[R] each."""
    start, end = simulation.start_s, simulation.end_s
    source = _binding_predecessors(tasks, actions, simulation)
    inner = np.ones(len(start), dtype=bool)
    inner[actions.rank_offset[:-1][np.diff(actions.rank_offset) > 0]] = False
    at = np.flatnonzero(inner)  # actions with an earlier one on their rank
    low = end[at - 1]
    waits = start[at] > low
    at, low = at[waits], low[waits]
    rank = actions.rank[at]
    hops_s, actions_s = np.zeros((2, actions.num_ranks))
    while len(at):
        # From the start of `at` back to the end of what it waited for there is a transfer, or nothing on the same rank.
        producer = source[at]
        arrived = np.maximum(low, end[producer])
        began = np.maximum(low, np.minimum(arrived, start[producer]))
        hops_s += np.bincount(rank, weights=start[at] - arrived, minlength=actions.num_ranks)
        actions_s += np.bincount(rank, weights=arrived - began, minlength=actions.num_ranks)
        more = start[producer] > low  # then its start is later than the step's, so it has a producer, too
        at, low, rank = producer[more], low[more], rank[more]
    return hops_s, actions_s


def _with_mean_seconds(tasks: PipelineTasks, axis: tuple[int, ...]) -> PipelineTasks:
    """Return the tasks with the mean over packs (axis 0), or over packs and stages (0, 1), of every kind's seconds."""

    def mean(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.zeros_like(seconds) + (seconds.mean(axis=axis, keepdims=True) if len(seconds) else 0.0)

    split = tasks.split
    if split is not None:
        split = dataclasses.replace(split, input_s=mean(split.input_s), weight_s=mean(split.weight_s))
    return dataclasses.replace(tasks, forward_s=mean(tasks.forward_s), backward_s=mean(tasks.backward_s), split=split)


def detailed_timeline(plan: StepPlan, costs: PackCosts) -> Timeline:
    """Return the timeline of all replicas of a plan, by the costs with which it was made; `ConfigError` where these
    cannot price it, for example because the link to the host is not known."""
    parts: list[Timeline] = []
    sides: list[SideTasks] = []
    critical, kinds = [], []
    replicas = _simulated(plan, costs)
    for dp_rank, replica in enumerate(replicas):
        tasks, actions, simulation = replica.tasks, replica.actions, replica.simulation
        on_path = np.zeros(len(actions.kind), bool)
        on_path[critical_path(tasks, actions, simulation)] = True
        parts.append(to_timeline(tasks, actions, simulation, dp_rank, plan.predicted.step_time_s))
        critical.append(on_path)
        kinds.append(memory_ledger(bytes_by_kind(costs.model, plan.layout, tasks, replica.packs), actions))
        sides += _inside(costs, replica, dp_rank)
        sides += _between_stages(replica, dp_rank)
    end = step_end(costs, replicas)
    for dp_rank in range(len(parts)):
        sides += _beside_and_after_packs(end, plan.layout, dp_rank)
    return join_timelines(
        parts,
        step_time_s=plan.predicted.step_time_s,
        is_critical=np.concatenate(critical),
        side=SideTasks(**joined(sides, SideTasks.__dataclass_fields__)),
        memory_kind_bytes=np.concatenate(kinds),
    )


def _simulated(plan: StepPlan, costs: PackCosts) -> list[Candidate]:
    result = []
    for dp_rank, schedule in enumerate(plan.schedules):
        packs, actions = replica_columns(plan, dp_rank), action_columns(schedule)
        tasks = tasks_of_columns(plan, dp_rank, costs.model, packs)
        result.append(Candidate(packs, tasks, actions, simulate(tasks, actions), shardings=packs.shardings))
    return result


def _beside_and_after_packs(end: StepEnd, layout: ParallelLayout, dp_rank: int) -> Iterator[SideTasks]:
    ranks = np.arange(len(end.reductions))
    stages = np.array([layout.stages_of_rank(rank)[0] for rank in ranks.tolist()])

    def of_rank(kind: str, rank: int, start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> SideTasks:
        runs = end_s > start_s
        same = np.full(int(runs.sum()), rank)
        return side_tasks(kind, dp_rank, same, stages[same], -1, start_s[runs], end_s[runs])

    for rank, reductions in enumerate(end.reductions):
        yield of_rank("reduction", rank, reductions.start_s, reductions.end_s)
    for rank, gathers in enumerate(end.gathers):
        yield of_rank("gather", rank, gathers.start_s, gathers.end_s)
        yield of_rank("weight_wait", rank, gathers.wait_start_s, gathers.wait_end_s)
    if end.updated_s > end.summed_s:
        yield side_tasks("optimizer", dp_rank, ranks, -1, -1, end.summed_s, end.updated_s)
    if end.end_s > end.updated_s:
        yield side_tasks("gather", dp_rank, ranks, stages, -1, end.updated_s, end.end_s)


def _inside(costs: PackCosts, replica: SimulatedReplica, dp_rank: int) -> Iterator[SideTasks]:
    columns = replica.packs
    if columns.policy is None:
        return
    actions, simulation = replica.actions, replica.simulation
    _, ranked = ranked_if_shared(costs, columns.forward, columns.backward, columns.shardings)
    again = split_pack_seconds(costs, columns.pieces("backward"), "backward", columns.policy, ranked)
    for kinds, name, seconds in (
        ("BI", "recompute", again.recompute_s),
        ("F", "offload", _copy_seconds(costs, columns, 0)),
        ("BI", "reload", _copy_seconds(costs, columns, 1)),
    ):
        at = np.flatnonzero(np.isin(actions.kind, [KINDS.index(kind) for kind in kinds]))
        taken_s = seconds[actions.pack[at], actions.stage[at]]
        at, taken_s = at[taken_s > 0], taken_s[taken_s > 0]
        # Out while the forward ends, in while the backward begins; both fit, as the action waits for its copies.
        start_s = simulation.end_s[at] - taken_s if name == "offload" else simulation.start_s[at]
        rank, stage, pack = actions.rank[at], actions.stage[at], actions.pack[at]
        yield side_tasks(name, dp_rank, rank, stage, pack, start_s, start_s + taken_s)


def _copy_seconds(costs: PackCosts, columns: ReplicaPacks, direction: int) -> NDArray[np.float64]:
    """Return the copies of every pack on every stage, the mean over ranks that hold different documents."""
    by_rank, ranks = columns.by_rank(costs.layout.cp), 1 if columns.owners is None else costs.layout.cp
    assert by_rank.policy is not None, "called for offloaded documents only"
    seconds = costs.copy_seconds((by_rank.forward, by_rank.backward)[direction], by_rank.policy)
    return seconds.reshape(ranks, len(seconds) // ranks, -1).mean(axis=0)


def _between_stages(replica: SimulatedReplica, dp_rank: int) -> Iterator[SideTasks]:
    actions = replica.actions
    producer, consumer, start_s, end_s = p2p_transfers(replica.tasks, actions, replica.simulation)
    is_forward = actions.kind[consumer] == KINDS.index("F")
    for name, of_kind in (("send_forward", is_forward), ("send_backward", ~is_forward)):
        chosen = of_kind & (end_s > start_s)
        sent, peer = producer[chosen], actions.rank[consumer[chosen]]
        rank, stage, pack = actions.rank[sent], actions.stage[sent], actions.pack[sent]
        yield side_tasks(name, dp_rank, rank, stage, pack, start_s[chosen], end_s[chosen], peer)


_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def split_proposal(proposal: Proposal) -> TimeSplit:
    """With the seconds of a change of layout before the step."""
    split = split_step_time(proposal.costs, proposal.choices)
    return msgspec.structs.replace(split, switch_s=proposal.switch_s)


def split_step_time(costs: PackCosts, choices: Sequence[ReplicaChoice]) -> TimeSplit:
    candidates = [choice.candidate for choice in choices]
    groups = len(candidates) * costs.layout.pipeline_ranks
    parts = _split_packs(costs, candidates, [len(choice.documents) for choice in choices])
    work_s = {
        name: sum(float(getattr(part, name).sum()) for part in parts) / groups for name in PackSplit.__annotations__
    }
    work_s["tp_communication_s"] += sum(_gathered_again_s(costs, one) for one in candidates) / groups
    bubbles = [split_bubble(one.tasks, one.actions, one.simulation) for one in candidates]
    makespan_s = np.array([one.makespan_s for one in candidates])
    end = step_end(costs, candidates)
    return TimeSplit(
        **work_s,
        **{name: sum(getattr(bubble, name) for bubble in bubbles) / groups for name in Bubble._fields},
        dp_imbalance_s=float((makespan_s.max() - makespan_s).mean()),
        reduction_s=end.summed_s - end.packs_s + end.end_s - end.updated_s,
        optimizer_s=end.updated_s - end.summed_s,
    )


def split_step_of_plan(plan: StepPlan, costs: PackCosts) -> TimeSplit:
    """Split as `split_step_time`, from a plan alone."""
    documents = np.arange(len(plan.documents))
    return split_step_time(costs, [ReplicaChoice(documents, one) for one in _simulated(plan, costs)])


def _split_packs(costs: PackCosts, candidates: Sequence[Candidate], num_documents: Sequence[int]) -> list[PackSplit]:
    """All replicas' packs of each direction at once: numpy calls cost more than their work here."""
    first_doc = np.cumsum([0, *num_documents[:-1]]).tolist()
    of_ways = [[one.packs.pieces(way) for one in candidates] for way in _DIRECTIONS]
    sides = [SliceColumns.concat(columns, first_doc) for columns in of_ways]
    policies, policy = [one.packs.policy for one in candidates], None
    if any(own is not None for own in policies):
        pairs = zip(policies, num_documents, strict=True)
        policy = np.concatenate([np.zeros(count, np.int8) if own is None else own for own, count in pairs])
    shardings: list[PackSharding] = [
        sharding for one in candidates for sharding in (one.shardings or ("",) * one.packs.forward.num_packs)
    ]
    ranked = ranked_if_shared(costs, sides[0], sides[1], shardings)
    return [
        split_pack_seconds(costs, columns, direction, policy, of_ranks, stops)
        for columns, direction, of_ranks, stops in zip(
            sides, _DIRECTIONS, ranked, (costs.stops_of(*sides), None), strict=True
        )
    ]


def _gathered_again_s(costs: PackCosts, candidate: Candidate) -> float:
    """What its backwards take on top because they run as I and W."""
    weights = candidate.actions.kind == KINDS.index("W")
    again_s = gather_seconds(costs, candidate.packs.backward)
    return float(again_s[candidate.actions.pack[weights], candidate.actions.stage[weights]].sum())


# Predicted seconds of a plan's packs, with what overlapped transfers take from them: what measured packs are held
# against. A plan's own times are those of packs alone.

_FIELDS = dict(zip("FBIW", ("forward_s", "backward_s", "input_s", "weight_s"), strict=True))


def overlapped_pack_times(plan: StepPlan, costs: PackCosts) -> tuple[PackTimes, ...]:
    """Return the times of every replica's packs, by the costs with which the plan was made; whole backwards of a
    schedule that splits them stay as planned."""
    end = step_end(costs, _simulated(plan, costs))
    return tuple(_times(times, replica, end) for times, replica in zip(plan.times, end.replicas, strict=True))


def _times(planned: PackTimes, replica: SimulatedReplica, end: StepEnd) -> PackTimes:
    fields = {kind: field for kind, field in _FIELDS.items() if getattr(planned, field)}
    seconds = {field: np.array(getattr(planned, field)) for field in fields.values()}
    actions, simulation = replica.actions, replica.simulation
    for rank, reductions in enumerate(end.reductions):
        own = slice(*actions.rank_offset[rank : rank + 2].tolist())
        took_s = reductions.overlapped(simulation.end_s[own]) - reductions.overlapped(simulation.start_s[own])
        for kind, field in fields.items():
            of_kind = actions.kind[own] == KINDS.index(kind)
            seconds[field][actions.pack[own][of_kind], actions.stage[own][of_kind]] = took_s[of_kind]
    return PackTimes(
        **{field: tuple(map(tuple, result.tolist())) for field, result in seconds.items()},
        p2p_forward_s=planned.p2p_forward_s,
        p2p_backward_s=planned.p2p_backward_s,
    )
