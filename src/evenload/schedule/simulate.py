"""Simulate when every action of a schedule runs and what every rank holds (SlimPack §4.3). O(actions), some 20 ns each.

    start = max(end of the previous action on the rank, end of the neighbour stage's action + p2p)

A backward runs whole (B) or as I, for which the neighbours wait, and later W. It also needs `forwards_needed` forwards
before it on its own stage. P2p transfers are delays of edges and do not queue. A forward adds what it keeps when it
starts, a backward frees it when it ends, temporary bytes are held while an action runs.
`tests/reference/simulation.py` is the same as an explicit graph, equal to the last bit.

`check_schedule` proves that a schedule is complete, in order and free of deadlock by running all actions in simulated
time, on every plan before execution: the simulator refuses actions on other ranks or out of pack order and stops where
an input comes too late; missing actions show in the counts. With directed channels in pack order on both sides nothing
else can block. O(actions), some 20 ns each.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.errors import ConfigError, InvalidPlanError, ScheduleDeadlockError
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks, SplitBackward, action_columns
from evenload.types.plan import Schedule
from evenload.types.text import counted
from evenload.types.timeline import KINDS, Timeline, joined

_SECONDS = tuple(field.name for field in fields(PipelineTasks) if field.name not in ("held", "split"))
_BYTES = tuple(field.name for field in fields(PackBytes))
_SPLIT = tuple(field.name for field in fields(SplitBackward))
_OF_STAGE_OR_RANK = ("stage_to_rank", "static_bytes")
_OF_PACK = ("p2p_forward_s", "p2p_backward_s", "forwards_needed")
_DTYPES = {
    name: np.dtype(np.float64 if name.endswith("_s") else np.int64 if name.endswith("_bytes") else np.int32)
    for name in (*_SECONDS, *_BYTES, *_SPLIT)
}


@dataclass(frozen=True, eq=False)
class Simulation:
    """Predicted execution of one replica's schedule: float64[n] times, aligned with the action columns, the end of the
    last action, and int64[R] the most each rank holds at any time, static bytes included."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    makespan_s: float
    peak_bytes: NDArray[np.int64]


def simulate(tasks: PipelineTasks, actions: ActionColumns) -> Simulation:
    """Run a schedule, or the beginning of one, in simulated time.

    Raises:
        ConfigError, ValueError: columns or values out of range, or packs of a stage not in index order.
        ScheduleDeadlockError: actions that wait for each other in a circle, or for one that never runs.
    """
    arrays, split = task_arrays(tasks), split_arrays(tasks)
    for name, dtype in (("kind", np.uint8), ("stage", np.int32), ("pack", np.int32), ("rank_offset", np.int64)):
        column = getattr(actions, name)
        _require_column(f"actions.{name}", column, np.dtype(dtype), (column.size,))
    if actions.num_ranks != tasks.num_ranks:
        raise ConfigError(f"actions of {actions.num_ranks} ranks for tasks on {tasks.num_ranks} ranks")
    start_s, end_s, peak_bytes, done = _native.simulate(
        arrays, actions.kind, actions.stage, actions.pack, actions.rank_offset, split
    )
    if int(done.sum()) < len(actions.kind):
        raise ScheduleDeadlockError(stuck_grid(tasks, actions, done))
    return Simulation(start_s, end_s, float(end_s.max(initial=0.0)), peak_bytes)


def to_timeline(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation, dp_rank: int, step_time_s: float
) -> Timeline:
    """Return the timeline of one replica: tasks in schedule order, and the memory samples of `memory_ledger`; the step
    time is that of all replicas."""
    rank = actions.rank.astype(np.int32)
    held = memory_ledger(tasks, actions)
    times_s = np.stack([simulation.start_s, simulation.end_s], axis=1).ravel()
    return Timeline(
        dp_rank=np.full(len(rank), dp_rank, dtype=np.int32),
        rank=rank,
        stage=actions.stage,
        kind=actions.kind,
        pack=actions.pack,
        start_s=simulation.start_s,
        end_s=simulation.end_s,
        step_time_s=step_time_s,
        memory_dp_rank=np.full(len(held), dp_rank, dtype=np.int32),
        memory_rank=np.repeat(np.arange(actions.num_ranks, dtype=np.int32), 1 + 2 * np.diff(actions.rank_offset)),
        memory_time_s=np.insert(times_s, 2 * actions.rank_offset[:-1], 0.0),
        memory_bytes=held,
    )


def join_timelines(parts: Sequence[Timeline], **more: Any) -> Timeline:
    """Join the timelines of a step's replicas, at least one; `more` are fields that are not joined: `step_time_s`, and
    what only the whole step knows."""
    of_tasks = ("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s")
    of_memory = ("memory_dp_rank", "memory_rank", "memory_time_s", "memory_bytes")
    return Timeline(**joined(parts, of_tasks + of_memory), **more)


def memory_ledger(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.int64]:
    """Return the bytes that ranks hold at the start of the step, and at the start and end of each of their actions;
    int64[num_samples], or int64[num_samples, K] of tasks by kind of memory (`cost.memory.bytes_by_kind`)."""
    held, split = tasks.held, tasks.split
    kept, freed, temporary = np.zeros((3, len(actions.kind), *held.static_bytes.shape[1:]), np.int64)
    moved = [
        (0, kept, held.forward_kept_bytes),
        (0, temporary, held.forward_temp_bytes),
        (1, freed, held.backward_freed_bytes),
        (1, temporary, held.backward_temp_bytes),
    ]
    if split is not None:
        moved += [
            (2, freed, split.input_freed_bytes),
            (2, temporary, split.input_temp_bytes),
            (3, freed, split.weight_freed_bytes),
        ]
    for kind, into, column in moved:
        at = np.flatnonzero(actions.kind == kind)
        into[at] = column[actions.pack[at], actions.stage[at]]
    samples = []
    for rank, static in enumerate(held.static_bytes):
        own = actions.of_rank(rank)
        after = static + np.cumsum(kept[own] - freed[own], axis=0)
        running = after + freed[own] + temporary[own]
        samples += [static[None], np.stack([running, after], axis=1).reshape(-1, *static.shape)]
    return np.concatenate(samples)


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


def task_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...]:
    """Return the columns of `tasks` and `tasks.held` in field order; `ConfigError` where a dtype, shape or memory order
    is not that of `PipelineTasks`. O(1)."""
    return _checked(tasks, "tasks", tasks, _SECONDS) + _checked(tasks, "tasks.held", tasks.held, _BYTES)


def split_arrays(tasks: PipelineTasks) -> tuple[NDArray[Any], ...] | None:
    """Return the columns of `tasks.split`, checked as by `task_arrays`; None where there is none."""
    return None if tasks.split is None else _checked(tasks, "tasks.split", tasks.split, _SPLIT)


def _checked(tasks: PipelineTasks, path: str, part: object, names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
    num_forward, num_backward, num_stages = tasks.num_forward, tasks.num_backward, tasks.num_stages
    arrays = tuple([getattr(part, name) for name in names])
    for name, array in zip(names, arrays, strict=True):
        shape: tuple[int, ...] = (num_forward if "forward_" in name else num_backward, num_stages)
        if name in _OF_PACK:
            shape = shape[:1]
        elif name in _OF_STAGE_OR_RANK:
            shape = (len(array),)
        _require_column(f"{path}.{name}", array, _DTYPES[name], shape)
    return arrays


def _require_column(name: str, array: NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ConfigError(
            f"{name} is {array.dtype}{list(array.shape)}, contiguous={array.flags.c_contiguous}; "
            f"expected contiguous {dtype}{list(shape)}"
        )


_SHOWN_BEFORE, _SHOWN_AFTER = 4, 6


def stuck_grid(tasks: PipelineTasks, actions: ActionColumns, done: NDArray[np.int64]) -> str:
    """Describe a deadlock: every rank's next actions, stuck ones with what they wait for; `done` is how many actions
    each rank ran, int64[R]."""
    next_actions = actions.rank_offset[:-1] + done
    forwards_done = np.zeros((tasks.num_ranks, tasks.num_stages), np.int64)
    for rank, (lo, hi) in enumerate(zip(actions.rank_offset[:-1], next_actions, strict=True)):
        np.add.at(forwards_done[rank], actions.stage[lo:hi][actions.kind[lo:hi] == 0], 1)
    lines = [f"deadlock: {int(done.sum())} of {len(actions.kind)} actions ran"]
    for rank, at in enumerate(next_actions.tolist()):
        lo, hi = int(actions.rank_offset[rank]), int(actions.rank_offset[rank + 1])
        first, last = max(lo, at - _SHOWN_BEFORE), min(hi, at + 1 + _SHOWN_AFTER)
        names = [f"{actions.stage[i]}{KINDS[actions.kind[i]]}{actions.pack[i]}" for i in range(first, last)]
        if at < hi:
            names[at - first] += f" <-- waits for {_awaited(tasks, actions, at, forwards_done[rank])} "
        head = f"({first - lo} before) " if first > lo else ""
        tail = f" ({hi - last} more)" if last < hi else ""
        lines.append(f"rank {rank}: {head}{' '.join(names)}{tail}" + ("" if at < hi else " done"))
    return "\n".join(lines)


def _awaited(tasks: PipelineTasks, actions: ActionColumns, at: int, forwards_done: NDArray[np.int64]) -> str:
    """Return the action that the one at a place waits for; `forwards_done`, int64[P], are those of its rank."""
    kind, stage, pack = KINDS[actions.kind[at]], int(actions.stage[at]), int(actions.pack[at])
    if kind == "F":
        return f"{stage - 1}F{pack}"
    if kind == "W":
        return f"{stage}I{pack}"
    width, needed = int(tasks.widths[stage]), int(tasks.forwards_needed[pack])
    own = range(pack % width, needed, width)  # the forwards it needs that its rank runs
    if forwards_done[stage] < len(own):
        return f"{stage}F{own[-1]}"
    return f"{min(stage + 1, tasks.num_stages - 1)}B{pack}"
