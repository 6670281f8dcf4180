"""Chrome/Perfetto `trace.json` of timelines: open it at ui.perfetto.dev or chrome://tracing.

One process for each timeline and data-parallel rank ("predicted dp 0", "measured dp 0"), one thread for each
pipeline rank, complete events named like `2F0` (stage, kind, pack), one memory counter for each rank. Where a
timeline knows them: events on the critical path have the category "critical" and say so in their arguments, bytes by
kind are counters of their own, and recompute, copies, p2p transfers and reduction are drawn (`report.side_events`).
Lanes of all timelines have equal names and order, so predicted and measured open side by side.

The format counts in microseconds. Starts and ends are rounded to whole nanoseconds first and durations are
their difference: neighbours that touch in the timeline touch in the trace, where separate rounding would make
them overlap and the viewer drop or nest them. Price: O(tasks + samples), about 150 bytes an event.
Format: "Trace Event Format", Google, 2016.
"""

import json
import os
from collections.abc import Iterator, Mapping

import numpy as np

from evenload.report.pack_label import PackKey, PackLabel
from evenload.report.side_events import name_events, side_events, task_event
from evenload.types.timeline import KINDS, MEMORY_KINDS, Timeline


def write_chrome_trace(
    path: str | os.PathLike[str],
    timelines: Mapping[str, Timeline],
    labels: Mapping[PackKey, PackLabel] | None = None,
) -> None:
    """Write timelines by name ("predicted", "measured"), in this order, with the content of packs (`label_packs`)."""
    events = list(_events(timelines, labels or {}))
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")


def _events(timelines: Mapping[str, Timeline], labels: Mapping[PackKey, PackLabel]) -> Iterator[dict[str, object]]:
    # Viewers take process 0 and thread 0 for the kernel's idle task, so both count from 1.
    pid = 0
    tid = 0
    for name, timeline in timelines.items():
        for dp_rank in np.union1d(timeline.dp_rank, timeline.memory_dp_rank).tolist():
            pid += 1
            yield from name_events("process", pid, 0, f"{name} dp {dp_rank}", pid)
            threads: dict[int, int] = {}
            ranks = np.union1d(
                timeline.rank[timeline.dp_rank == dp_rank], timeline.memory_rank[timeline.memory_dp_rank == dp_rank]
            )
            for rank in ranks.tolist():
                tid += 1
                threads[rank] = tid
                yield from name_events("thread", pid, tid, f"rank {rank}", rank)
            yield from _task_events(timeline, dp_rank, pid, threads, labels)
            if timeline.side is not None:
                for event in side_events(timeline.side, dp_rank, pid, threads, tid + 1):
                    tid += event["name"] == "thread_name"
                    yield event
            yield from _memory_events(timeline, dp_rank, pid)
            yield from _memory_kind_events(timeline, dp_rank, pid)


def _task_events(
    timeline: Timeline, dp_rank: int, pid: int, threads: Mapping[int, int], labels: Mapping[PackKey, PackLabel]
) -> Iterator[dict[str, object]]:
    chosen = np.flatnonzero(timeline.dp_rank == dp_rank)
    chosen = chosen[np.argsort(timeline.start_s[chosen], kind="stable")]
    start_ns = np.rint(timeline.start_s[chosen] * 1e9).astype(np.int64)
    end_ns = np.rint(timeline.end_s[chosen] * 1e9).astype(np.int64)
    critical = np.zeros(len(chosen), bool) if timeline.is_critical is None else timeline.is_critical[chosen]
    for rank, stage, kind, pack, start, end, is_critical in zip(
        timeline.rank[chosen].tolist(),
        timeline.stage[chosen].tolist(),
        timeline.kind[chosen].tolist(),
        timeline.pack[chosen].tolist(),
        start_ns.tolist(),
        end_ns.tolist(),
        critical.tolist(),
        strict=True,
    ):
        letter = KINDS[kind]
        direction = "forward" if letter == "F" else "backward"
        args: dict[str, object] = {"stage": stage, "pack": pack, "direction": direction}
        args |= labels.get((dp_rank, direction, pack), {})
        if is_critical:
            args["critical"] = True
        category = f"{direction},critical" if is_critical else direction
        yield task_event(f"{stage}{letter}{pack}", category, pid, threads[rank], start, end, args)


def _memory_events(timeline: Timeline, dp_rank: int, pid: int) -> Iterator[dict[str, object]]:
    chosen = np.flatnonzero(timeline.memory_dp_rank == dp_rank)
    time_ns = np.rint(timeline.memory_time_s[chosen] * 1e9).astype(np.int64)
    for rank, time, num_bytes in zip(
        timeline.memory_rank[chosen].tolist(), time_ns.tolist(), timeline.memory_bytes[chosen].tolist(), strict=True
    ):
        # A counter belongs to a process, so its name says the rank.
        name = f"memory bytes rank {rank}"
        yield {"ph": "C", "name": name, "pid": pid, "ts": time / 1000, "args": {"bytes": num_bytes}}


def _memory_kind_events(timeline: Timeline, dp_rank: int, pid: int) -> Iterator[dict[str, object]]:
    """Kinds that change within the step, for each rank; the others are constant and in the total."""
    if timeline.memory_kind_bytes is None:
        return
    for rank in np.unique(timeline.memory_rank[timeline.memory_dp_rank == dp_rank]).tolist():
        chosen = np.flatnonzero((timeline.memory_dp_rank == dp_rank) & (timeline.memory_rank == rank))
        held = timeline.memory_kind_bytes[chosen]
        moving = np.flatnonzero(held.max(axis=0) > held.min(axis=0)).tolist()
        time_ns = np.rint(timeline.memory_time_s[chosen] * 1e9).astype(np.int64)
        for time, row in zip(time_ns.tolist() if moving else (), held[:, moving].tolist(), strict=False):
            args = {MEMORY_KINDS[kind]: num_bytes for kind, num_bytes in zip(moving, row, strict=True)}
            yield {"ph": "C", "name": f"memory kinds rank {rank}", "pid": pid, "ts": time / 1000, "args": args}
