"""Trace events of what happens beside the packs (`SideTasks`): recompute, copies, p2p transfers, reduction, optimizer.

Recompute lies inside its backward, reduction and optimizer after the packs, all on the rank's own thread. Copies have
a thread for every rank ("rank 0 copies"), transfers one for every link ("rank 0 to 1"). Transfers under way at the
same time, as edge delays allow, get further threads of the same link, because events on a thread must not overlap.
Starts and ends are rounded to nanoseconds each, as those of the packs. O(n log n).
"""

import heapq
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from evenload.types.timeline import SIDE_KINDS, SideTasks

_ON_THE_RANK = ("recompute", "reduction", "optimizer")


def side_events(
    side: SideTasks, dp_rank: int, pid: int, threads: Mapping[int, int], first_tid: int
) -> Iterator[dict[str, object]]:
    """Events of one replica, names of new threads first; these count up from `first_tid`."""
    streams: dict[str, list[int]] = {}
    for row in np.flatnonzero(side.dp_rank == dp_rank).tolist():
        kind, rank = SIDE_KINDS[side.kind[row]], int(side.rank[row])
        if kind in _ON_THE_RANK:
            name = ""
        else:
            name = f"rank {rank} copies" if side.peer[row] < 0 else f"rank {rank} to {side.peer[row]}"
        streams.setdefault(name, []).append(row)
    tid = first_tid
    for row in streams.pop("", []):
        yield _event(side, row, pid, threads[int(side.rank[row])])
    for order, name in enumerate(sorted(streams)):
        for at, rows in enumerate(_apart(side, np.array(streams[name]))):
            stream = name if at == 0 else f"{name} ({at + 1})"
            yield from name_events("thread", pid, tid, stream, len(threads) + order)
            for row in rows:
                yield _event(side, row, pid, tid)
            tid += 1


def _apart(side: SideTasks, rows: NDArray[np.intp]) -> list[list[int]]:
    """Rows by start, assigned to as few threads as keep events of a thread from overlapping."""
    streams: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (end in ns, stream)
    for row in rows[np.argsort(side.start_s[rows], kind="stable")].tolist():
        start, end = _nanoseconds(float(side.start_s[row])), _nanoseconds(float(side.end_s[row]))
        if free and free[0][0] <= start:
            stream = heapq.heappop(free)[1]
        else:
            stream = len(streams)
            streams.append([])
        streams[stream].append(row)
        heapq.heappush(free, (end, stream))
    return streams


def _event(side: SideTasks, row: int, pid: int, tid: int) -> dict[str, object]:
    kind = SIDE_KINDS[side.kind[row]]
    start, end = _nanoseconds(float(side.start_s[row])), _nanoseconds(float(side.end_s[row]))
    args: dict[str, object] = {}
    if side.pack[row] >= 0:
        args = {"stage": int(side.stage[row]), "pack": int(side.pack[row])}
    name = f"{kind} {side.stage[row]}.{side.pack[row]}" if args else kind
    return task_event(name, kind, pid, tid, start, end, args)


def name_events(what: str, pid: int, tid: int, name: str, place: int) -> Iterator[dict[str, object]]:
    """The name of a "process" or "thread", and where it stands among the others."""
    for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
        yield {"ph": "M", "name": f"{what}_{key}", "pid": pid, "tid": tid, "args": args}


def task_event(
    name: str, category: str, pid: int, tid: int, start_ns: int, end_ns: int, args: dict[str, object]
) -> dict[str, object]:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _nanoseconds(seconds: float) -> int:
    return int(np.rint(seconds * 1e9))
