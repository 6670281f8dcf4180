"""Check that a schedule is complete, in order, and free of deadlock, on every plan before execution.

Running all actions in simulated time proves it: the simulator refuses actions on other ranks or out of pack order and
stops where an input comes too late; missing actions show in the counts. With directed channels in pack order on both
sides nothing else can block. O(actions), some 20 ns each.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from evenload import _native
from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.schedule.native_input import split_arrays, stuck_grid, task_arrays
from evenload.types.pipeline import ActionColumns, PipelineTasks, action_columns
from evenload.types.plan import Schedule
from evenload.types.text import counted
from evenload.types.timeline import KINDS


def check_schedule(
    schedule: Schedule | ActionColumns,
    *,
    num_forward: int,
    forwards_needed: Sequence[int],
    stage_to_rank: Sequence[int],
    num_ranks: int | None = None,
) -> None:
    """Check that every F and every B, or I and later W, runs once on every stage, on its own rank, in pack order, and
    that all can run.

    Args:
        num_forward, forwards_needed, stage_to_rank: as of `PipelineTasks`.
        num_ranks: pipeline ranks; None = one for every number in `stage_to_rank`.

    Raises:
        InvalidPlanError: an action missing, twice, out of order or on another rank.
        ScheduleDeadlockError: no rank can go on (a kind of InvalidPlanError), also where W comes before its I.
    """
    actions = action_columns(schedule) if isinstance(schedule, Schedule) else schedule
    num_backward, num_stages = len(forwards_needed), len(stage_to_rank)
    seconds = np.zeros((num_backward, num_stages))
    tasks = PipelineTasks.without_bytes(
        forward_s=np.zeros((num_forward, num_stages)),
        backward_s=seconds,
        p2p_forward_s=np.zeros(num_forward),
        p2p_backward_s=np.zeros(num_backward),
        forwards_needed=forwards_needed,
        stage_to_rank=stage_to_rank,
        parts_s=(seconds, seconds),
        num_ranks=num_ranks,
    )
    if actions.num_ranks != tasks.num_ranks:
        raise InvalidPlanError(f"the schedule has {actions.num_ranks} ranks, stages are on {tasks.num_ranks}")
    needed = tasks.forwards_needed.tolist()
    if any(not 0 <= count <= num_forward for count in needed):
        raise InvalidPlanError(f"forwards_needed {needed} must lie in 0..{num_forward}, the number of forward packs")
    columns = (actions.kind, actions.stage, actions.pack, actions.rank_offset)
    try:
        *_, done = _native.simulate(task_arrays(tasks), *columns, split_arrays(tasks))
    except ValueError as refusal:
        raise InvalidPlanError(_miscounted(actions, tasks) or str(refusal)) from None
    if int(done.sum()) == len(actions.kind) and _has_all(actions, num_forward, num_backward, num_stages):
        return
    if fault := _miscounted(actions, tasks):
        raise InvalidPlanError(fault)
    raise ScheduleDeadlockError(stuck_grid(tasks, actions, done))


def _has_all(actions: ActionColumns, num_forward: int, num_backward: int, num_stages: int) -> bool:
    """Whether actions that all ran, so none twice, are all that the packs need."""
    forwards, backwards, inputs, weights = np.bincount(actions.kind, minlength=len(KINDS))[: len(KINDS)].tolist()
    return (
        forwards == num_forward * num_stages and backwards + inputs == num_backward * num_stages and inputs == weights
    )


def _miscounted(actions: ActionColumns, tasks: PipelineTasks) -> str:
    """Name an action that does not run as often as it must on its rank; "" where all do."""
    for stage, (first, width) in enumerate(zip(tasks.stage_to_rank.tolist(), tasks.widths.tolist(), strict=True)):
        for turn in range(width):
            own = actions.of_rank(first + turn)
            columns = (actions.kind[own].tolist(), actions.stage[own].tolist(), actions.pack[own].tolist())
            rows = zip(*columns, strict=True)
            ran = Counter[tuple[str, int]]((KINDS[kind], pack) for kind, of_stage, pack in rows if of_stage == stage)
            inputs = {pack for kind, pack in ran if kind == "I"}
            due = [("F", pack) for pack in range(turn, tasks.num_forward, width)]
            due += [("I" if pack in inputs else "B", pack) for pack in range(turn, tasks.num_backward, width)]
            due += [("W", pack) for pack in inputs]
            for kind, pack in (*due, *ran):
                if ran[kind, pack] != (expected := int((kind, pack) in due)):
                    count = f"{counted(ran[kind, pack], 'time')} on rank {first + turn}"
                    return f"{stage}{kind}{pack} runs {count}, must run {counted(expected, 'time')} there"
    return ""
