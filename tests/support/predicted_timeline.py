"""`predicted_timeline`: the simulator's timeline of a whole StepPlan, all replicas, memory included.

`explore.timelines` shows more to users, and needs the costs with which the plan was made.
"""

from evenload.schedule.simulate import join_timelines, simulate, to_timeline
from evenload.stepplan.resimulation import replica_columns, tasks_of_columns
from evenload.types.model import ModelSpec
from evenload.types.pipeline import action_columns
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline


def predicted_timeline(plan: StepPlan, model: ModelSpec) -> Timeline:
    """Simulate a plan from its own durations; the model decides the bytes, which a plan does not store."""
    parts = []
    for dp_rank, schedule in enumerate(plan.schedules):
        tasks = tasks_of_columns(plan, dp_rank, model, replica_columns(plan, dp_rank))
        actions = action_columns(schedule)
        parts.append(to_timeline(tasks, actions, simulate(tasks, actions), dp_rank, plan.predicted.step_time_s))
    return join_timelines(parts, step_time_s=plan.predicted.step_time_s)
