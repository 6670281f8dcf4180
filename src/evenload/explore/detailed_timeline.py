"""`detailed_timeline`: a chosen plan with everything that the planners' simulation only counts in sums.

With the start and end of every action and the bytes as planned:

    critical path    which actions set the end of their replica
    recompute        the front of a backward (or of its I): forward work repeated before gradients flow
    offload, reload  copies on the rank's copy stream, beside compute: out at the end of the forward, in from the start
                     of the backward (of I, where it is split). An action lasts as long as the longer of compute and
                     copy, so the copy fits inside it, and what compute does not hide is in the planners' seconds
    p2p              transfers between stages, as edge delays
    reduction, optimizer    of every replica and rank, after the slowest replica, as the plan's step time counts them
    memory by kind   at every sample

Price: some milliseconds a replica; for plans that somebody looks at.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory_kinds import bytes_by_kind
from evenload.cost.owned_bytes import rank_view
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_split import split_pack_seconds
from evenload.simulate.critical_path import critical_path
from evenload.simulate.links import Hops, hops
from evenload.simulate.memory_ledger import memory_ledger
from evenload.simulate.simulate import Simulation, simulate
from evenload.simulate.timeline import join_timelines, to_timeline
from evenload.stepplan.plan_tasks import ReplicaColumns, replica_columns, tasks_of_columns
from evenload.types.pipeline import ActionColumns, PipelineTasks, action_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import SIDE_KINDS, SideTasks, Timeline

_Rows = tuple[str, NDArray, NDArray, NDArray, NDArray, NDArray, NDArray]
"""Side tasks of one kind: (kind, rank, stage, pack, peer, start_s, end_s)."""


def detailed_timeline(plan: StepPlan, costs: PackCosts) -> Timeline:
    """Everything about a plan, all replicas.

    Args:
        costs: with which it was planned: they tell recompute and copies apart from other compute.

    Raises:
        ConfigError: the costs cannot price the plan, for example because the link to the host is not known.
    """
    parts: list[Timeline] = []
    sides: list[tuple[int, list[_Rows]]] = []
    critical, kinds = [], []
    for dp_rank, schedule in enumerate(plan.schedules):
        columns, actions = replica_columns(plan, dp_rank), action_columns(schedule)
        tasks = tasks_of_columns(plan, dp_rank, costs.model, columns)
        simulation = simulate(tasks, actions)
        transfers = hops(tasks, actions, simulation)
        on_path = np.zeros(len(actions.kind), bool)
        on_path[critical_path(tasks, actions, simulation).actions] = True
        parts.append(to_timeline(tasks, actions, simulation, dp_rank, plan.predicted.step_time_s))
        critical.append(on_path)
        kinds.append(_memory_kinds(plan, costs, columns, tasks, actions))
        rows = _inside(costs, columns, tasks, actions, simulation)
        sides.append((dp_rank, [*rows, *_hop_rows(actions, transfers)]))
    makespan_s = max(float(part.end_s.max(initial=0.0)) for part in parts)
    return join_timelines(
        parts,
        step_time_s=plan.predicted.step_time_s,
        is_critical=np.concatenate(critical),
        side=_side_tasks(sides, costs, makespan_s),
        memory_kind_bytes=np.concatenate(kinds),
    )


def _memory_kinds(
    plan: StepPlan, costs: PackCosts, columns: ReplicaColumns, tasks: PipelineTasks, actions: ActionColumns
) -> NDArray[np.int64]:
    held = bytes_by_kind(
        costs.model,
        plan.layout,
        tasks,
        columns.forward,
        columns.backward,
        columns.num_tokens,
        columns.policy,
        columns.owners,
    )
    return memory_ledger(held, actions)


def _inside(
    costs: PackCosts,
    columns: ReplicaColumns,
    tasks: PipelineTasks,
    actions: ActionColumns,
    simulation: Simulation,
) -> list[_Rows]:
    """Recompute and copies of every action that has them."""
    if columns.policy is None:
        return []
    owner = None if columns.owners is None else columns.owners[1]
    again_s = split_pack_seconds(
        costs, columns.backward, "backward", columns.policy, owner, tasks.backward_s
    ).recompute_s
    copy_s = [_copy_seconds(costs, columns, direction) for direction in (0, 1)]
    found = []
    for kind, name, seconds in ((1, "recompute", again_s), (0, "offload", copy_s[0]), (1, "reload", copy_s[1])):
        runs = (actions.kind == kind) | ((actions.kind == 2) & (kind == 1))
        at = np.flatnonzero(runs)
        taken_s = seconds[actions.pack[at], actions.stage[at]]
        at, taken_s = at[taken_s > 0], taken_s[taken_s > 0]
        # Out while the forward ends, in while the backward begins; both fit, as the action waits for its copies.
        start_s = simulation.end_s[at] - taken_s if name == "offload" else simulation.start_s[at]
        end_s = start_s + taken_s
        found.append(
            (name, _ranks(actions)[at], actions.stage[at], actions.pack[at], np.full(len(at), -1), start_s, end_s)
        )
    return found


def _copy_seconds(costs: PackCosts, columns: ReplicaColumns, direction: int) -> NDArray[np.float64]:
    """Of every pack on every stage; the mean over ranks that hold different documents."""
    packs, policy = (columns.forward, columns.backward)[direction], columns.policy
    assert policy is not None, "asked for offloaded documents only"
    if columns.owners is None:
        return costs.copy_seconds(packs, policy)
    views = [rank_view(packs, columns.owners[direction], rank) for rank in range(costs.layout.cp)]
    return np.mean([costs.copy_seconds(view, policy) for view in views], axis=0)


def _hop_rows(actions: ActionColumns, transfers: Hops) -> list[_Rows]:
    rank = _ranks(actions)
    found = []
    for name, forward in (("send_forward", True), ("send_backward", False)):
        chosen = (actions.kind[transfers.consumer] == 0) == forward
        chosen &= transfers.end_s > transfers.start_s
        sent, received = transfers.producer[chosen], transfers.consumer[chosen]
        times = transfers.start_s[chosen], transfers.end_s[chosen]
        found.append((name, rank[sent], actions.stage[sent], actions.pack[sent], rank[received], *times))
    return found


def _ranks(actions: ActionColumns) -> NDArray[np.int64]:
    """Pipeline rank of every action."""
    return np.repeat(np.arange(actions.num_ranks), np.diff(actions.rank_offset))


def _side_tasks(sides: list[tuple[int, list[_Rows]]], costs: PackCosts, makespan_s: float) -> SideTasks:
    """All replicas' side tasks, and the end of the step on every rank."""
    reduced_s = makespan_s + costs.reduction_seconds()
    ends = (("reduction", makespan_s, reduced_s), ("optimizer", reduced_s, reduced_s + costs.optimizer_seconds()))
    columns: list[list[NDArray]] = [[] for _ in range(8)]
    for dp_rank, rows in sides:
        ranks = np.arange(costs.layout.pp)
        none = np.full(len(ranks), -1)
        after = [
            (name, ranks, none, none, none, np.full(len(ranks), start_s), np.full(len(ranks), end_s))
            for name, start_s, end_s in ends
            if end_s > start_s
        ]
        for kind, rank, stage, pack, peer, start_s, end_s in (*rows, *after):
            of_kind = np.full(len(rank), SIDE_KINDS.index(kind))
            of_replica = np.full(len(rank), dp_rank)
            for column, values in zip(
                columns, (of_replica, rank, of_kind, stage, pack, peer, start_s, end_s), strict=True
            ):
                column.append(values)
    names = ("dp_rank", "rank", "kind", "stage", "pack", "peer", "start_s", "end_s")
    joined: dict[str, Any] = {}
    for name, column in zip(names, columns, strict=True):
        dtype = np.float64 if name.endswith("_s") else np.uint8 if name == "kind" else np.int32
        joined[name] = np.concatenate(column).astype(dtype) if column else np.zeros(0, dtype)
    return SideTasks(**joined)
