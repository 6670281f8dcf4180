"""`forward_only`: a step's plan without its backwards, for what needs losses and no gradients (validation).

Packs, their order on every rank and who computes which rows stay. A forward waits for forwards alone, so any order that
the whole plan can be executed in is one of its forwards, too; `check_schedule` proves it of every plan all the same.
Documents that only backwards cut are not cut any more, so their keys and values need not be kept. O(actions).
"""

import msgspec

from evenload.schedule.validate import check_schedule
from evenload.types.plan import StepPlan, seal
from evenload.types.schedule import Schedule


def forward_only(plan: StepPlan) -> StepPlan:
    """The same forwards, sealed.

    Raises:
        InvalidPlanError: a forward is missing, twice, out of order or on another rank.
        ScheduleDeadlockError: forwards wait for each other.
    """
    replace = msgspec.structs.replace
    schedules = tuple(
        Schedule(ranks=tuple(tuple(action for action in row if action.kind == "F") for row in one.ranks))
        for one in plan.schedules
    )
    packs = tuple(replace(one, backward=()) for one in plan.pack_plans)
    for one, schedule in zip(packs, schedules, strict=True):
        check_schedule(
            schedule,
            num_forward=len(one.forward),
            forwards_needed=(),
            stage_to_rank=plan.layout.stage_to_rank,
            num_ranks=plan.layout.pipeline_ranks,
        )
    times = tuple(replace(one, backward_s=(), p2p_backward_s=(), input_s=(), weight_s=()) for one in plan.times)
    return seal(replace(plan, pack_plans=packs, schedules=schedules, times=times))
