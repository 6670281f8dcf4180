"""`detailed_timeline`: a chosen plan with everything that the planners' simulation only counts in sums.

With the start and end of every action and the bytes as planned:

    critical path    which actions set the end of their replica
    recompute        the front of a backward (or of its I): forward work repeated before gradients flow
    offload, reload  copies on the rank's copy stream, beside compute: out at the end of the forward, in from the start
                     of the backward (of I, where it is split). An action lasts as long as the longer of compute and
                     copy, so the copy fits inside it, and what compute does not hide is in the planners' seconds
    p2p              transfers between stages, as edge delays
    reduction    sums of gradients, unit by unit, of every replica and rank; partly beside compute (`simulate.step_end`)
    optimizer    of every replica and rank, after the last sum
    gather    of updated weights, unit by unit, beside the first packs (`simulate.step_start`, which also says when
              forwards wait for them), or after the update
    memory by kind   at every sample

Price: some milliseconds a replica; for plans that somebody looks at.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import bytes_by_kind, rank_view
from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_split import split_pack_seconds
from evenload.simulate.critical_path import critical_path, p2p_transfers
from evenload.simulate.simulate import Simulation, simulate
from evenload.simulate.step_end import StepEnd, step_end
from evenload.simulate.step_start import SimulatedReplica
from evenload.simulate.timeline import join_timelines, memory_ledger, to_timeline
from evenload.stepplan.plan_tasks import ReplicaColumns, replica_columns, tasks_of_columns
from evenload.stepplan.ranked_packs import ranked_where_shared
from evenload.types.layout import ParallelLayout
from evenload.types.pipeline import ActionColumns, PipelineTasks, action_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import KINDS, SideTasks, Timeline, side_tasks


def detailed_timeline(plan: StepPlan, costs: PackCosts) -> Timeline:
    """Everything about a plan, all replicas.

    Args:
        costs: with which it was planned: they tell recompute and copies apart from other compute.

    Raises:
        ConfigError: the costs cannot price the plan, for example because the link to the host is not known.
    """
    parts: list[Timeline] = []
    sides: list[SideTasks] = []
    critical, kinds, replicas = [], [], []
    for dp_rank, schedule in enumerate(plan.schedules):
        columns, actions = replica_columns(plan, dp_rank), action_columns(schedule)
        packs = (columns.forward, columns.backward, columns.num_tokens, columns.policy, columns.owners)
        tasks = tasks_of_columns(plan, dp_rank, costs.model, columns)
        simulation = simulate(tasks, actions)
        replicas.append(SimulatedReplica(columns.forward, columns.backward, tasks, actions, simulation))
        on_path = np.zeros(len(actions.kind), bool)
        on_path[critical_path(tasks, actions, simulation).actions] = True
        parts.append(to_timeline(tasks, actions, simulation, dp_rank, plan.predicted.step_time_s))
        critical.append(on_path)
        kinds.append(memory_ledger(bytes_by_kind(costs.model, plan.layout, tasks, *packs), actions))
        sides += _inside(costs, columns, tasks, actions, simulation, dp_rank)
        sides += _between_stages(tasks, actions, simulation, dp_rank)
    end = step_end(costs, replicas)
    for dp_rank in range(len(parts)):
        sides += _beside_and_after_packs(end, plan.layout, dp_rank)
    names = [field.name for field in dataclasses.fields(SideTasks)]
    return join_timelines(
        parts,
        step_time_s=plan.predicted.step_time_s,
        is_critical=np.concatenate(critical),
        side=SideTasks(**{name: np.concatenate([getattr(side, name) for side in sides]) for name in names}),
        memory_kind_bytes=np.concatenate(kinds),
    )


def _beside_and_after_packs(end: StepEnd, layout: ParallelLayout, dp_rank: int) -> Iterator[SideTasks]:
    """Sums of gradients, gathers of weights and the update, of one replica; what takes no time is left out."""
    ranks = np.arange(len(end.sums))
    stages = np.array([layout.stages_of_rank(rank)[0] for rank in ranks.tolist()])

    def of_rank(kind: str, rank: int, start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> SideTasks:
        runs = end_s > start_s
        same = np.full(int(runs.sum()), rank)
        return side_tasks(kind, dp_rank, same, stages[same], -1, start_s[runs], end_s[runs])

    for rank, sums in enumerate(end.sums):
        yield of_rank("reduction", rank, sums.start_s, sums.end_s)
    for rank, gathers in enumerate(end.gathers):
        yield of_rank("gather", rank, gathers.start_s, gathers.end_s)
        yield of_rank("weight_wait", rank, gathers.wait_start_s, gathers.wait_end_s)
    if end.updated_s > end.summed_s:
        yield side_tasks("optimizer", dp_rank, ranks, -1, -1, end.summed_s, end.updated_s)
    if end.end_s > end.updated_s:
        yield side_tasks("gather", dp_rank, ranks, stages, -1, end.updated_s, end.end_s)


def _inside(
    costs: PackCosts,
    columns: ReplicaColumns,
    tasks: PipelineTasks,
    actions: ActionColumns,
    simulation: Simulation,
    dp_rank: int,
) -> Iterator[SideTasks]:
    """Recompute and copies of every action that has them."""
    if columns.policy is None:
        return
    _, ranked = ranked_where_shared(costs, columns.forward, columns.backward, columns.shardings)
    again = split_pack_seconds(costs, columns.backward, "backward", columns.policy, ranked)
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


def _copy_seconds(costs: PackCosts, columns: ReplicaColumns, direction: int) -> NDArray[np.float64]:
    """Of every pack on every stage; the mean over ranks that hold different documents."""
    packs, policy = (columns.forward, columns.backward)[direction], columns.policy
    assert policy is not None, "asked for offloaded documents only"
    if columns.owners is None:
        return costs.copy_seconds(packs, policy)
    views = [rank_view(packs, columns.owners[direction], rank) for rank in range(costs.layout.cp)]
    return np.mean([costs.copy_seconds(view, policy) for view in views], axis=0)


def _between_stages(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation, dp_rank: int
) -> Iterator[SideTasks]:
    producer, consumer, start_s, end_s = p2p_transfers(tasks, actions, simulation)
    is_forward = actions.kind[consumer] == KINDS.index("F")
    for name, of_kind in (("send_forward", is_forward), ("send_backward", ~is_forward)):
        chosen = of_kind & (end_s > start_s)
        sent, peer = producer[chosen], actions.rank[consumer[chosen]]
        rank, stage, pack = actions.rank[sent], actions.stage[sent], actions.pack[sent]
        yield side_tasks(name, dp_rank, rank, stage, pack, start_s[chosen], end_s[chosen], peer)
