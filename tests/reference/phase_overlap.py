"""Actions of later phases in the gaps of earlier ones, rank by rank, as `evenload.plan.sharing.phase_overlap` says."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.schedule.simulate import simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (KINDS.index(kind) for kind in "FBIW")
_Row = tuple[int, int, int]
"""Kind, stage and pack of an action."""


def run_ahead(
    tasks: PipelineTasks,
    actions: ActionColumns,
    phase_of_forward: NDArray[np.int64],
    phase_of_backward: NDArray[np.int64],
    cap_bytes: NDArray[np.int64] | None,
) -> ActionColumns:
    """The same actions, later phases in the gaps of earlier ones.

    Args:
        actions: phase after phase on every rank.
        phase_of_forward, phase_of_backward: of every pack, not falling; int64[m_f], int64[m_b].
        cap_bytes: int64[R] that ranks may hold, None = not limited.
    """
    is_forward = actions.kind == _FORWARD
    phase = np.empty(len(actions.kind), np.int64)
    phase[is_forward] = phase_of_forward[actions.pack[is_forward]]
    phase[~is_forward] = phase_of_backward[actions.pack[~is_forward]]
    kinds, stages, packs = actions.kind.tolist(), actions.stage.tolist(), actions.pack.tolist()
    rows: dict[int, list[list[_Row]]] = {
        number: [[] for _ in range(actions.num_ranks)] for number in np.unique(phase).tolist()
    }
    for rank in range(actions.num_ranks):
        own = actions.of_rank(rank)
        for at in range(own.start, own.stop):
            rows[int(phase[at])][rank].append((kinds[at], stages[at], packs[at]))
    first, *later = (rows[number] for number in sorted(rows))
    for following in later:
        first = _joined(tasks, first, following, cap_bytes)
    return _columns(first)


def _columns(rows: list[list[_Row]]) -> ActionColumns:
    return ActionColumns.of_ranks([tuple(zip(*row, strict=True)) or ((), (), ()) for row in rows])  # type: ignore[misc]


class _Seconds:
    """Of actions and of what they wait for."""

    def __init__(self, tasks: PipelineTasks) -> None:
        self._of = {_FORWARD: tasks.forward_s, _BACKWARD: tasks.backward_s}
        if tasks.split is not None:
            self._of |= {_INPUT: tasks.split.input_s, _WEIGHT: tasks.split.weight_s}
        self._hop_s = tasks.p2p_forward_s, tasks.p2p_backward_s
        self._last_stage = tasks.num_stages - 1
        self._ends: dict[tuple[bool, int, int], float] = {}

    def take(self, row: _Row) -> float:
        """How long an action takes."""
        kind, stage, pack = row
        return float(self._of[kind][pack, stage])

    def arrival(self, row: _Row) -> float | None:
        """When its input is there; None = not known yet."""
        kind, stage, pack = row
        is_forward = kind == _FORWARD
        if kind == _WEIGHT or stage == (0 if is_forward else self._last_stage):
            return 0.0
        sent_s = self._ends.get((is_forward, stage - 1 if is_forward else stage + 1, pack))
        return None if sent_s is None else sent_s + float(self._hop_s[not is_forward][pack])

    def ended(self, row: _Row, end_s: float) -> None:
        """Record when an action ends."""
        kind, stage, pack = row
        if kind != _WEIGHT:
            self._ends[kind == _FORWARD, stage, pack] = end_s


class _Bytes:
    """What actions hold on a rank."""

    def __init__(self, tasks: PipelineTasks) -> None:
        held, split = tasks.held, tasks.split
        self._kept = {_FORWARD: held.forward_kept_bytes, _BACKWARD: -held.backward_freed_bytes}
        self._temp = {_FORWARD: held.forward_temp_bytes, _BACKWARD: held.backward_temp_bytes}
        if split is not None:
            self._kept |= {_INPUT: -split.input_freed_bytes, _WEIGHT: -split.weight_freed_bytes}
            self._temp |= {_INPUT: split.input_temp_bytes, _WEIGHT: np.zeros_like(split.input_temp_bytes)}

    def change(self, row: _Row) -> tuple[int, int]:
        """What an action adds to what is held, and the most that it adds while it runs."""
        kind, stage, pack = row
        kept, temp = int(self._kept[kind][pack, stage]), int(self._temp[kind][pack, stage])
        # A forward takes what it keeps when it starts; a backward gives back when it ends.
        return kept, max(kept, kept + temp if kind == _FORWARD else temp)


@dataclass(eq=False)
class _Rank:
    """A rank's shared actions, which stay where they are, and what runs between them.

    Args:
        rows, start_s, end_s: of the shared actions.
        before: bytes held before each of them, and after the last.
        peak: the most held from each of them on.
        last: by (is forward, stage) one behind the last shared action of it.
        waiting: actions that follow, in their order.
    """

    rows: list[_Row]
    start_s: list[float]
    end_s: list[float]
    before: list[int]
    peak: list[int]
    last: dict[tuple[bool, int], int]
    waiting: list[_Row]
    placed: list[_Row]
    at: int = 0
    taken: int = 0
    own_bytes: int = 0
    free_s: float = 0.0

    def step(self, arrival_s: float, take_s: float, change: tuple[int, int], cap: int | None, until_s: float) -> float:
        """Put the next action into the first gap that holds it; its end, or infinity where none does."""
        row = self.waiting[self.taken]
        kept, most = change
        kind, stage, _ = row
        earliest = 0 if kind == _WEIGHT else self.last.get((kind == _FORWARD, stage), 0)
        while True:
            start_s = max(self.free_s, arrival_s)
            if start_s >= until_s:
                return float("inf")
            is_last = self.at == len(self.rows)
            fits_time = is_last or start_s + take_s <= self.start_s[self.at]
            if self.at >= earliest and fits_time and self._fits(kept, most, cap):
                break
            if is_last:
                return float("inf")
            self.placed.append(self.rows[self.at])
            self.free_s = self.end_s[self.at]
            self.at += 1
        self.placed.append(row)
        self.taken += 1
        self.own_bytes += kept
        self.free_s = start_s + take_s
        return self.free_s

    def _fits(self, kept: int, most: int, cap: int | None) -> bool:
        if cap is None:
            return True
        now = self.own_bytes + self.before[self.at] + most
        later = self.own_bytes + kept + self.peak[self.at]
        return now <= cap and (kept <= 0 or later <= cap)

    def rest(self) -> list[_Row]:
        return [*self.placed, *self.rows[self.at :], *self.waiting[self.taken :]]


def _joined(
    tasks: PipelineTasks, first: list[list[_Row]], following: list[list[_Row]], cap_bytes: NDArray[np.int64] | None
) -> list[list[_Row]]:
    """Per rank both, in one order."""
    actions = _columns(first)
    found = simulate(tasks, actions)
    seconds, held = _Seconds(tasks), _Bytes(tasks)
    ranks = []
    for index, (rows, waiting) in enumerate(zip(first, following, strict=True)):
        own = actions.of_rank(index)
        start_s, end_s = found.start_s[own].tolist(), found.end_s[own].tolist()
        ranks.append(_rank(rows, start_s, end_s, waiting, int(tasks.held.static_bytes[index]), held))
    caps = [None] * len(ranks) if cap_bytes is None else cap_bytes.tolist()
    going = True
    while going:
        going = False
        for rank, cap in zip(ranks, caps, strict=True):
            while rank.taken < len(rank.waiting):
                row = rank.waiting[rank.taken]
                arrival_s = seconds.arrival(row)
                if arrival_s is None:
                    break
                end_s = rank.step(arrival_s, seconds.take(row), held.change(row), cap, found.makespan_s)
                if end_s == float("inf"):
                    break
                seconds.ended(row, end_s)
                going = True
    return [rank.rest() for rank in ranks]


def _rank(
    rows: list[_Row], start_s: list[float], end_s: list[float], waiting: list[_Row], static_bytes: int, held: _Bytes
) -> _Rank:
    changes = [held.change(row) for row in rows]
    before = np.cumsum([static_bytes, *(kept for kept, _ in changes)]).tolist()
    peak = [before[-1]]
    for live, (_, most) in zip(reversed(before[:-1]), reversed(changes), strict=True):
        peak.append(max(peak[-1], live, live + most))
    last = {(kind == _FORWARD, stage): at + 1 for at, (kind, stage, _) in enumerate(rows) if kind != _WEIGHT}
    return _Rank(rows, start_s, end_s, before, peak[::-1], last, waiting, [])
