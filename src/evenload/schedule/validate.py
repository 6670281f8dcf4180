"""Check that a schedule is complete, in order, and free of deadlock, on every plan before execution.

Running all actions in simulated time proves it: the simulator refuses actions on other ranks or out of pack order and
stops where an input comes too late; missing actions show in the counts. With directed channels in pack order on both
sides nothing else can block. O(actions), some 20 ns each.
"""

from collections.abc import Sequence

import numpy as np

from evenload import _native
from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.schedule.native_input import split_arrays, stuck_grid, task_arrays
from evenload.types.pipeline import ActionColumns, PipelineTasks, action_columns
from evenload.types.plan import Schedule
from evenload.types.timeline import KINDS

_INPUT, _WEIGHT = KINDS.index("I"), KINDS.index("W")


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
        InvalidPlanError: an action missing, twice, out of order or on another rank; W without I before it.
        ScheduleDeadlockError: no rank can go on (a kind of InvalidPlanError).
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
        raise InvalidPlanError(_first_fault(actions, tasks) or str(refusal)) from None
    if int(done.sum()) == len(actions.kind) and _has_all(actions, num_forward, num_backward, num_stages):
        return
    fault = _first_fault(actions, tasks)
    if fault is not None:
        raise InvalidPlanError(fault)
    raise ScheduleDeadlockError(stuck_grid(tasks, actions, done))


def _has_all(actions: ActionColumns, num_forward: int, num_backward: int, num_stages: int) -> bool:
    """Whether actions that all ran, so none twice, are all that the packs need."""
    forwards, backwards, inputs, weights = np.bincount(actions.kind, minlength=len(KINDS))[: len(KINDS)].tolist()
    return (
        forwards == num_forward * num_stages and backwards + inputs == num_backward * num_stages and inputs == weights
    )


def _first_fault(actions: ActionColumns, tasks: PipelineTasks) -> str | None:
    """Name the first action that is missing, twice, out of order or on another rank; None where there is none."""
    widths, first_ranks = tasks.widths.tolist(), tasks.stage_to_rank.tolist()
    # By F or B, stage and turn of its rank: that rank's next pack.
    following = {
        (way, stage, turn): turn for way in (0, 1) for stage, width in enumerate(widths) for turn in range(width)
    }
    totals = (tasks.num_forward, tasks.num_backward)
    weights_due: set[tuple[int, int]] = set()
    for rank in range(actions.num_ranks):
        own = actions.of_rank(rank)
        columns = (actions.kind[own].tolist(), actions.stage[own].tolist(), actions.pack[own].tolist())
        for at, (kind, stage, pack) in enumerate(zip(*columns, strict=True)):
            where = f"rank {rank} action {at} is {stage}{KINDS[kind]}{pack}"
            if not 0 <= stage < len(widths) or not 0 <= rank - first_ranks[stage] < widths[stage]:
                spans = enumerate(zip(first_ranks, widths, strict=True))
                here = [stage for stage, (first, width) in spans if first <= rank < first + width]
                return f"{where}, but this rank runs stages {here}"
            width = widths[stage]
            turn = rank - first_ranks[stage]
            if pack % width != turn:
                rank_of_pack = f"{first_ranks[stage]} + k % {width}"
                return f"{where}, but packs go round: pack k of stage {stage} runs on rank {rank_of_pack}"
            if kind == _WEIGHT:
                if (stage, pack) not in weights_due:
                    return f"{where}, but {stage}I{pack} does not stand before it or has had its W"
                weights_due.remove((stage, pack))
                continue
            if kind == _INPUT:
                weights_due.add((stage, pack))
            direction = min(kind, 1)
            expected = following[direction, stage, turn]
            if pack != expected or pack >= totals[direction]:
                named = f"{stage}{KINDS[kind]}{expected}" if expected < totals[direction] else "no further one"
                return f"{where} where {named} is next; packs run once each, in index order"
            if direction == 1 and following[0, stage, turn] < tasks.forwards_needed[pack]:
                return (
                    f"{where}, but its documents need forwards 0..{tasks.forwards_needed[pack] - 1} and only "
                    f"{following[0, stage, turn]} ran before it on stage {stage}"
                )
            following[direction, stage, turn] += width
    return _missing(following, totals, tasks) or _missing_weight(weights_due, tasks)


def _missing(following: dict[tuple[int, int, int], int], totals: tuple[int, int], tasks: PipelineTasks) -> str | None:
    for (direction, stage, turn), pack in following.items():
        if pack < totals[direction]:
            width = int(tasks.widths[stage])
            ran, wanted = (len(range(turn, stop, width)) for stop in (pack, totals[direction]))
            return (
                f"stage {stage} runs {ran} of {wanted} {('forward', 'backward')[direction]} packs; "
                f"{stage}{KINDS[direction]}{pack} is missing on rank {tasks.stage_to_rank[stage] + turn}"
            )
    return None


def _missing_weight(weights_due: set[tuple[int, int]], tasks: PipelineTasks) -> str | None:
    for stage, pack in sorted(weights_due):
        rank = int(tasks.stage_to_rank[stage]) + pack % int(tasks.widths[stage])
        return f"stage {stage}: {stage}W{pack} is missing after {stage}I{pack} on rank {rank}"
    return None
