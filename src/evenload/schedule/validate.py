"""Is a schedule complete, in order, and free of deadlock? Run on every plan before execution.

`check_schedule` checks what can be read off each rank's list; `replay_rendezvous` (its own file) executes
the lists against the runtime's channels. Both O(actions).
"""

from collections.abc import Sequence

import numpy as np

from evenload.errors import InvalidPlanError
from evenload.schedule.rendezvous import replay_rendezvous
from evenload.types.pipeline import ActionColumns, action_columns
from evenload.types.schedule import Schedule
from evenload.types.timeline import KINDS

_INPUT, _WEIGHT = KINDS.index("I"), KINDS.index("W")


def check_schedule(
    schedule: Schedule | ActionColumns,
    *,
    num_forward: int,
    forwards_needed: Sequence[int],
    stage_to_rank: Sequence[int],
) -> None:
    """Every F once and every B, or I and later W, once on every stage, on its own rank, in pack order, executable.

    Pack order per stage makes every channel first-in-first-out. A backward stands after the forwards it
    needs. At the end the schedule is replayed with the runtime's channels.

    Args:
        num_forward: forward packs, m_f.
        forwards_needed: D, one entry per backward pack (`PackPlan.forwards_needed()` or
            `PipelineTasks.forwards_needed`).
        stage_to_rank: pipeline rank of every virtual stage.

    Raises:
        InvalidPlanError: an action missing, twice, out of order or on another rank; W without I before it.
        ScheduleDeadlockError: no rank can go on (a kind of InvalidPlanError).
    """
    actions = action_columns(schedule) if isinstance(schedule, Schedule) else schedule
    needed = [int(count) for count in forwards_needed]
    ranks = [int(rank) for rank in stage_to_rank]
    num_stages, num_ranks = len(ranks), max(ranks, default=-1) + 1
    if actions.num_ranks != num_ranks:
        raise InvalidPlanError(f"the schedule has {actions.num_ranks} ranks, stages are on {num_ranks}")
    if any(not 0 <= count <= num_forward for count in needed):
        raise InvalidPlanError(f"forwards_needed {needed} must lie in 0..{num_forward}, the number of forward packs")
    done = np.zeros((2, num_stages), dtype=np.int64).tolist()  # [F or B][stage]: packs seen
    totals = (num_forward, len(needed))
    weights_due: set[tuple[int, int]] = set()
    for rank in range(num_ranks):
        lo, hi = int(actions.rank_offset[rank]), int(actions.rank_offset[rank + 1])
        columns = (actions.kind[lo:hi].tolist(), actions.stage[lo:hi].tolist(), actions.pack[lo:hi].tolist())
        for at, (kind, stage, pack) in enumerate(zip(*columns, strict=True)):
            name = f"{stage}{KINDS[kind]}{pack}"
            where = f"rank {rank} action {at} is {name}"
            if not 0 <= stage < num_stages or ranks[stage] != rank:
                raise InvalidPlanError(f"{where}, but this rank runs stages {_stages_of(ranks, rank)}")
            if kind == _WEIGHT:
                if (stage, pack) not in weights_due:
                    raise InvalidPlanError(f"{where}, but {stage}I{pack} does not stand before it or has had its W")
                weights_due.remove((stage, pack))
                continue
            if kind == _INPUT:
                weights_due.add((stage, pack))
                kind = 1
            expected = done[kind][stage]
            if pack != expected or pack >= totals[kind]:
                following = f"{stage}{KINDS[columns[0][at]]}{expected}" if expected < totals[kind] else "no further one"
                raise InvalidPlanError(f"{where} where {following} is next; packs run once each, in index order")
            if kind == 1 and done[0][stage] < needed[pack]:
                raise InvalidPlanError(
                    f"{where}, but its documents need forwards 0..{needed[pack] - 1} and only {done[0][stage]} "
                    f"ran before it on stage {stage}"
                )
            done[kind][stage] += 1
    for kind in (0, 1):
        for stage in range(num_stages):
            if done[kind][stage] < totals[kind]:
                raise InvalidPlanError(
                    f"stage {stage} runs {done[kind][stage]} of {totals[kind]} {('forward', 'backward')[kind]} packs; "
                    f"{stage}{KINDS[kind]}{done[kind][stage]} is missing on rank {ranks[stage]}"
                )
    if weights_due:
        stage, pack = min(weights_due)
        raise InvalidPlanError(f"stage {stage}: {stage}W{pack} is missing after {stage}I{pack} on rank {ranks[stage]}")
    replay_rendezvous(actions, forwards_needed=needed, stage_to_rank=ranks)


def _stages_of(ranks: list[int], rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(ranks) if owner == rank]
