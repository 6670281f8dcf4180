"""Is a schedule complete, in order, and free of deadlock? Run on every plan before execution.

The specification is Python: `check_schedule` checks what can be read off each rank's list, `replay_rendezvous` (its
own file) executes the lists against the runtime's channels. Both O(actions), about 5 us an action.

The native core says "valid" much faster, and on anything else the specification names the offence. Running all
actions in the simulator proves the same: it refuses actions on other ranks or out of pack order, and gets stuck where
an input or a needed forward comes too late; with directed channels in pack order on both sides nothing else can
block, because sends are not waited for and receives are posted in that order. What it does not see, missing actions
at the end of a list, shows in the counts.
"""

from collections.abc import Sequence

import numpy as np

from evenload import _native
from evenload.errors import InvalidPlanError
from evenload.schedule.rendezvous import replay_rendezvous
from evenload.schedule.task_arrays import split_arrays, task_arrays
from evenload.types.backend import Backend
from evenload.types.pipeline import ActionColumns, PipelineTasks, SplitBackward, action_columns
from evenload.types.schedule import Schedule
from evenload.types.timeline import KINDS

_INPUT, _WEIGHT = KINDS.index("I"), KINDS.index("W")


def check_schedule(
    schedule: Schedule | ActionColumns,
    *,
    num_forward: int,
    forwards_needed: Sequence[int],
    stage_to_rank: Sequence[int],
    backend: Backend = "native",
) -> None:
    """Every F once and every B, or I and later W, once on every stage, on its own rank, in pack order, executable.

    Pack order per stage makes every channel first-in-first-out. A backward stands after the forwards it
    needs. At the end the schedule is replayed with the runtime's channels.

    Args:
        num_forward: forward packs, m_f.
        forwards_needed: D, one entry per backward pack (`PackPlan.forwards_needed()` or
            `PipelineTasks.forwards_needed`).
        stage_to_rank: pipeline rank of every virtual stage.
        backend: "python" for the specification alone.

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
    if backend == "native" and _is_valid(actions, num_forward, needed, ranks):
        return
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
    if backend == "native":
        raise RuntimeError("the native check refuses a schedule in which its specification finds no fault")


def _is_valid(actions: ActionColumns, num_forward: int, needed: list[int], ranks: list[int]) -> bool:
    """Whether every action runs in simulated time, and none is missing."""
    m_b, num_stages = len(needed), len(ranks)
    counts = np.bincount(actions.kind, minlength=len(KINDS))
    if counts[0] != num_forward * num_stages or counts[1] + counts[2] != m_b * num_stages or counts[2] != counts[3]:
        return False
    seconds = {rows: np.zeros((rows, num_stages)) for rows in {num_forward, m_b}}
    sizes = {rows: np.zeros((rows, num_stages), np.int64) for rows in {num_forward, m_b}}
    tasks = PipelineTasks(
        forward_s=seconds[num_forward],
        backward_s=seconds[m_b],
        p2p_forward_s=np.zeros(num_forward),
        p2p_backward_s=np.zeros(m_b),
        forwards_needed=np.array(needed, np.int32),
        stage_to_rank=np.array(ranks, np.int32),
        static_bytes=np.zeros(actions.num_ranks, np.int64),
        forward_kept_bytes=sizes[num_forward],
        forward_temp_bytes=sizes[num_forward],
        backward_freed_bytes=sizes[m_b],
        backward_temp_bytes=sizes[m_b],
        split=SplitBackward(
            input_s=seconds[m_b],
            weight_s=seconds[m_b],
            input_freed_bytes=sizes[m_b],
            input_temp_bytes=sizes[m_b],
            weight_freed_bytes=sizes[m_b],
        ),
    )
    columns = (actions.kind, actions.stage, actions.pack, actions.rank_offset)
    try:
        *_, done = _native.simulate(task_arrays(tasks), *columns, split_arrays(tasks))
    except ValueError:
        return False  # an action out of order or on another rank; the specification says which
    return int(done.sum()) == len(actions.kind)


def _stages_of(ranks: list[int], rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(ranks) if owner == rank]
