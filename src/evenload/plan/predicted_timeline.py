"""`predicted_timeline`: the simulator's timeline of a whole StepPlan, all replicas, memory included."""

import numpy as np

from evenload.plan.plan_tasks import replica_tasks
from evenload.simulate.simulate import simulate
from evenload.simulate.timeline import to_timeline
from evenload.types.model import ModelSpec
from evenload.types.pipeline import action_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline


def predicted_timeline(plan: StepPlan, model: ModelSpec) -> Timeline:
    """Simulate a plan from its own durations; O(actions).

    Args:
        model: decides the bytes, which a plan does not store.
    """
    parts = []
    for dp_rank, schedule in enumerate(plan.schedules):
        tasks, actions = replica_tasks(plan, dp_rank, model), action_columns(schedule)
        parts.append(to_timeline(tasks, actions, simulate(tasks, actions), dp_rank, plan.predicted.step_time_s))
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (
            "dp_rank",
            "rank",
            "stage",
            "kind",
            "pack",
            "start_s",
            "end_s",
            "memory_dp_rank",
            "memory_rank",
            "memory_time_s",
            "memory_bytes",
        )
    }
    return Timeline(step_time_s=plan.predicted.step_time_s, **columns)
