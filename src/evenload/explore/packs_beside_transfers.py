"""Predicted seconds of a plan's packs with what transfers beside them take: what a measured pack is held against.

A plan's own times are those of packs with nothing beside them, because searches choose among packs by them. While the
gradients of a step are summed unit by unit, the last backward of a rank goes on more slowly, and so does its first
forward while updated weights arrive (`simulate.step_end`, `simulate.step_start`). The plan's step time has both; here
they are told of the packs that they belong to.

Price: that of a `step_end`, some milliseconds.
"""

import numpy as np

from evenload.cost.pack_cost import PackCosts
from evenload.simulate.simulate import simulate
from evenload.simulate.step_end import StepEnd, step_end
from evenload.simulate.step_start import SimulatedReplica
from evenload.stepplan.plan_tasks import replica_columns, timed_tasks
from evenload.types.pipeline import action_columns
from evenload.types.plan import PackTimes, StepPlan
from evenload.types.timeline import KINDS

_FIELDS = dict(zip("FBIW", ("forward_s", "backward_s", "input_s", "weight_s"), strict=True))


def times_beside_transfers(plan: StepPlan, costs: PackCosts) -> tuple[PackTimes, ...]:
    """Of every replica; whole backwards of a schedule that splits them stay as planned.

    Args:
        costs: with which it was planned.

    Raises:
        ConfigError: the costs cannot price the plan.
    """
    replicas = []
    for dp_rank, schedule in enumerate(plan.schedules):
        columns, actions, tasks = replica_columns(plan, dp_rank), action_columns(schedule), timed_tasks(plan, dp_rank)
        replicas.append(SimulatedReplica(columns.forward, columns.backward, tasks, actions, simulate(tasks, actions)))
    end = step_end(costs, replicas)
    return tuple(_times(times, replica, end) for times, replica in zip(plan.times, end.replicas, strict=True))


def _times(planned: PackTimes, replica: SimulatedReplica, end: StepEnd) -> PackTimes:
    fields = {kind: field for kind, field in _FIELDS.items() if getattr(planned, field)}
    seconds = {field: np.array(getattr(planned, field)) for field in fields.values()}
    actions, simulation = replica.actions, replica.simulation
    for rank, sums in enumerate(end.sums):
        own = slice(*actions.rank_offset[rank : rank + 2].tolist())
        took_s = sums.put_off(simulation.end_s[own]) - sums.put_off(simulation.start_s[own])
        for kind, field in fields.items():
            of_kind = actions.kind[own] == KINDS.index(kind)
            seconds[field][actions.pack[own][of_kind], actions.stage[own][of_kind]] = took_s[of_kind]
    return PackTimes(
        **{field: tuple(map(tuple, found.tolist())) for field, found in seconds.items()},
        p2p_forward_s=planned.p2p_forward_s,
        p2p_backward_s=planned.p2p_backward_s,
    )
