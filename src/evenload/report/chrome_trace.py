"""Write timelines as Chrome/Perfetto `trace.json`, for ui.perfetto.dev or chrome://tracing.

Each timeline and data-parallel rank is a process ("predicted dp 0", "measured dp 0"), each pipeline rank a thread with
events named like `2F0` (stage, kind, pack) and a memory counter. Events on the critical path have the category
"critical". Recompute and the optimizer are on the rank's thread. Copies ("rank 0 copies"), reductions ("rank 0 sums"),
gathers ("rank 0 weights") and transfers ("rank 0 to 1") have threads of their own, several where they overlap. Names
and order are the same in all timelines. Starts and ends are rounded to whole nanoseconds, so that neighbours touch.
About 150 bytes an event; O(n log n). Format: "Trace Event Format", Google, 2016.
"""

import heapq
import json
import os
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from evenload.types.document import Direction, MicroPack
from evenload.types.plan import StepPlan
from evenload.types.text import format_count
from evenload.types.timeline import KINDS, MEMORY_KINDS, SIDE_KINDS, SideTasks, Timeline

PackKey = tuple[int, Direction, int]
"""(dp rank, direction, pack index): the same for every stage and for predicted and measured."""
PackLabel = Mapping[str, int | str]
"""Real `tokens`, `documents`, `slices` that are a piece of their document, and `content`: the first documents by id and
range."""
MAX_DOCUMENTS = 4
"""Listed by name, because every stage repeats them."""


def label_packs(plan: StepPlan) -> dict[PackKey, PackLabel]:
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    return {
        (packs.dp_rank, pack.direction, pack.index): _label(pack, num_tokens)
        for packs in plan.pack_plans
        for pack in (*packs.forward, *packs.backward)
    }


def _label(pack: MicroPack, num_tokens: dict[int, int]) -> PackLabel:
    texts = []
    for piece in pack.slices[:MAX_DOCUMENTS]:
        length, part = format_count(num_tokens[piece.doc_id]), f"[{piece.start}, {piece.stop}) of "
        is_whole = piece.num_tokens == num_tokens[piece.doc_id]
        texts.append(f"{piece.doc_id} ({length})" if is_whole else f"{piece.doc_id} {part}{length}")
    if len(pack.slices) > MAX_DOCUMENTS:
        texts.append(f"{len(pack.slices) - MAX_DOCUMENTS} more")
    return {
        "tokens": pack.num_tokens,
        "documents": len(pack.slices),
        "slices": sum(piece.num_tokens != num_tokens[piece.doc_id] for piece in pack.slices),
        "content": "doc " + ", ".join(texts) if texts else "",
    }


_STREAMS = {"recompute": "", "optimizer": "", "reduction": " sums", "gather": " weights", "weight_wait": " weights"}
"""Threads of their own, by kind of side task; "" = the rank's."""


def write_chrome_trace(
    path: str | os.PathLike[str], timelines: Mapping[str, Timeline], labels: Mapping[PackKey, PackLabel] | None = None
) -> None:
    """Write timelines by name ("predicted", "measured"), in this order, with the content of packs (`label_packs`)."""
    events = list(_events(timelines, labels or {}))
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")


def _events(timelines: Mapping[str, Timeline], labels: Mapping[PackKey, PackLabel]) -> Iterator[dict[str, object]]:
    # Viewers take process 0 and thread 0 for the kernel's idle task, so both count from 1.
    pid = tid = 0
    for name, timeline in timelines.items():
        for dp_rank in np.union1d(timeline.dp_rank, timeline.memory_dp_rank).tolist():
            pid += 1
            yield from _name_events("process", pid, 0, f"{name} dp {dp_rank}", pid)
            of_memory = timeline.memory_rank[timeline.memory_dp_rank == dp_rank]
            ranks = np.union1d(timeline.rank[timeline.dp_rank == dp_rank], of_memory).tolist()
            threads = {rank: tid + 1 + at for at, rank in enumerate(ranks)}
            tid += len(threads)
            for rank, thread in threads.items():
                yield from _name_events("thread", pid, thread, f"rank {rank}", rank)
            yield from _task_events(timeline, dp_rank, pid, threads, labels)
            if timeline.side is not None:
                for event in _side_events(timeline.side, dp_rank, pid, threads, tid + 1):
                    tid += event["name"] == "thread_name"
                    yield event
            yield from _memory_events(timeline, dp_rank, pid)


def _task_events(
    timeline: Timeline, dp_rank: int, pid: int, threads: Mapping[int, int], labels: Mapping[PackKey, PackLabel]
) -> Iterator[dict[str, object]]:
    chosen = np.flatnonzero(timeline.dp_rank == dp_rank)
    for row in chosen[np.argsort(timeline.start_s[chosen], kind="stable")].tolist():
        stage, pack, letter = int(timeline.stage[row]), int(timeline.pack[row]), KINDS[timeline.kind[row]]
        category = direction = "forward" if letter == "F" else "backward"
        args: dict[str, object] = {"stage": stage, "pack": pack, "direction": direction}
        args |= labels.get((dp_rank, direction, pack), {})
        if timeline.is_critical is not None and timeline.is_critical[row]:
            category, args["critical"] = f"{direction},critical", True
        thread, times_s = threads[int(timeline.rank[row])], (timeline.start_s[row], timeline.end_s[row])
        yield _task_event(f"{stage}{letter}{pack}", category, pid, thread, times_s, args)


def _side_events(
    side: SideTasks, dp_rank: int, pid: int, threads: Mapping[int, int], first_tid: int
) -> Iterator[dict[str, object]]:
    """Return the events of one replica, names of new threads, numbered from `first_tid`, first."""
    streams: dict[str, list[int]] = {}
    # Gathers that end before the step are not of it.
    for row in np.flatnonzero((side.dp_rank == dp_rank) & (side.end_s > 0)).tolist():
        kind, rank = SIDE_KINDS[side.kind[row]], int(side.rank[row])
        name = _STREAMS.get(kind, " copies" if side.peer[row] < 0 else f" to {side.peer[row]}")
        streams.setdefault(name and f"rank {rank}{name}", []).append(row)
    tid = first_tid
    for row in streams.pop("", []):
        yield _side_event(side, row, pid, threads[int(side.rank[row])])
    for order, name in enumerate(sorted(streams)):
        for at, rows in enumerate(_apart(side, np.array(streams[name]))):
            stream = name if at == 0 else f"{name} ({at + 1})"
            yield from _name_events("thread", pid, tid, stream, len(threads) + order)
            for row in rows:
                yield _side_event(side, row, pid, tid)
            tid += 1


def _apart(side: SideTasks, rows: NDArray[np.intp]) -> list[list[int]]:
    """Assign rows to as few threads as keep their events from overlapping."""
    streams: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (end in ns, stream)
    for row in rows[np.argsort(side.start_s[rows], kind="stable")].tolist():
        if free and free[0][0] <= _nanoseconds(side.start_s[row]):
            stream = heapq.heappop(free)[1]
        else:
            stream = len(streams)
            streams.append([])
        streams[stream].append(row)
        heapq.heappush(free, (_nanoseconds(side.end_s[row]), stream))
    return streams


def _side_event(side: SideTasks, row: int, pid: int, tid: int) -> dict[str, object]:
    kind, stage, pack = SIDE_KINDS[side.kind[row]], int(side.stage[row]), int(side.pack[row])
    name, args = (kind, {}) if pack < 0 else (f"{kind} {stage}.{pack}", {"stage": stage, "pack": pack})
    return _task_event(name, kind, pid, tid, (max(0.0, side.start_s[row]), side.end_s[row]), args)


def _memory_events(timeline: Timeline, dp_rank: int, pid: int) -> Iterator[dict[str, object]]:
    """Return the memory of each rank: its total, and the kinds that change within the step."""
    for rank in np.unique(timeline.memory_rank[timeline.memory_dp_rank == dp_rank]).tolist():
        chosen = np.flatnonzero((timeline.memory_dp_rank == dp_rank) & (timeline.memory_rank == rank))
        # A counter belongs to a process, so its name has the rank.
        counters = {f"memory bytes rank {rank}": {"bytes": timeline.memory_bytes[chosen]}}
        if timeline.memory_kind_bytes is not None:
            held = timeline.memory_kind_bytes[chosen]
            moving = np.flatnonzero(held.max(axis=0) > held.min(axis=0)).tolist()
            counters[f"memory kinds rank {rank}"] = {MEMORY_KINDS[kind]: held[:, kind] for kind in moving}
        for name, columns in counters.items():
            for row, time_s in enumerate(timeline.memory_time_s[chosen] if columns else ()):
                args = {key: int(values[row]) for key, values in columns.items()}
                yield {"ph": "C", "name": name, "pid": pid, "ts": _nanoseconds(time_s) / 1000, "args": args}


def _name_events(what: str, pid: int, tid: int, name: str, place: int) -> Iterator[dict[str, object]]:
    """Return the name of a "process" or "thread", and its place among the others."""
    for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
        yield {"ph": "M", "name": f"{what}_{key}", "pid": pid, "tid": tid, "args": args}


def _task_event(
    name: str, category: str, pid: int, tid: int, times_s: tuple[float, float], args: Mapping[str, object]
) -> dict[str, object]:
    start, end = map(_nanoseconds, times_s)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times, "args": args}


def _nanoseconds(seconds: float) -> int:
    return round(float(seconds) * 1e9)
