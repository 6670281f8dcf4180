import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

from evenload.report.chrome_trace import write_chrome_trace
from report_samples import make_labels, make_timeline


@pytest.fixture
def timelines():
    return {"predicted": make_timeline(2, 4, 8), "measured": make_timeline(2, 4, 8, noise=0.2, split=True)}


def read_trace(path):
    trace = json.loads(path.read_text())
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    processes = {pid: args["name"] for (name, pid, _), args in names.items() if name == "process_name"}
    threads = {(pid, tid): args["name"] for (name, pid, tid), args in names.items() if name == "thread_name"}
    return trace, processes, threads


def test_events_are_the_tasks_in_microseconds(tmp_path, timelines):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, timelines)
    trace, processes, threads = read_trace(path)
    seen = {
        (processes[event["pid"]], threads[event["pid"], event["tid"]], event["name"]): (event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    }
    assert len(seen) == sum(timeline.num_tasks for timeline in timelines.values())
    for name, t in timelines.items():
        for i in range(t.num_tasks):
            action = f"{t.stage[i]}{'FBIW'[t.kind[i]]}{t.pack[i]}"
            start_us, duration_us = seen[f"{name} dp {t.dp_rank[i]}", f"rank {t.rank[i]}", action]
            assert start_us == pytest.approx(t.start_s[i] * 1e6, abs=1e-3)
            assert duration_us == pytest.approx((t.end_s[i] - t.start_s[i]) * 1e6, abs=2e-3)


def test_sums_equal_the_timeline(tmp_path, timelines):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, timelines)
    trace, processes, threads = read_trace(path)
    sums = defaultdict(float)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            sums[processes[event["pid"]], threads[event["pid"], event["tid"]]] += event["dur"]
    assert len(sums) == 2 * 2 * 4
    for name, t in timelines.items():
        for dp, rank in {*zip(t.dp_rank.tolist(), t.rank.tolist(), strict=True)}:
            chosen = (t.dp_rank == dp) & (t.rank == rank)
            busy_us = (t.end_s - t.start_s)[chosen].sum() * 1e6
            # Every task is off by at most one nanosecond of rounding.
            assert sums[f"{name} dp {dp}", f"rank {rank}"] == pytest.approx(busy_us, abs=1e-3 * chosen.sum())


def test_tasks_that_touch_do_not_overlap_after_rounding(tmp_path, timelines):
    """Perfetto drops or nests complete events that overlap on a thread."""
    path = tmp_path / "trace.json"
    write_chrome_trace(path, timelines)
    lanes = defaultdict(list)
    for event in read_trace(path)[0]["traceEvents"]:
        if event["ph"] == "X":
            lanes[event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    touching = 0
    for spans in lanes.values():
        spans.sort()
        for (start, duration), (following, _) in pairwise(spans):
            assert start + duration <= following
            touching += start + duration == following
    assert touching > 50


def test_lanes_have_equal_names_in_every_process_and_ids_are_unique(tmp_path, timelines):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, timelines)
    _, processes, threads = read_trace(path)
    assert list(processes.values()) == ["predicted dp 0", "predicted dp 1", "measured dp 0", "measured dp 1"]
    for pid in processes:
        assert [name for (p, _), name in threads.items() if p == pid] == [f"rank {rank}" for rank in range(4)]
    assert len({tid for _, tid in threads}) == len(threads)
    assert 0 not in processes
    assert 0 not in {tid for _, tid in threads}


def test_memory_counters_carry_every_sample(tmp_path, timelines):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, timelines)
    trace, processes, _ = read_trace(path)
    counters = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            counters[processes[event["pid"]], event["name"]].append((event["ts"], event["args"]["bytes"]))
    t = timelines["measured"]
    chosen = (t.memory_dp_rank == 1) & (t.memory_rank == 2)
    samples = counters["measured dp 1", "memory bytes rank 2"]
    assert [num_bytes for _, num_bytes in samples] == t.memory_bytes[chosen].tolist()
    assert np.allclose([time for time, _ in samples], t.memory_time_s[chosen] * 1e6, atol=1e-3)
    assert sum(map(len, counters.values())) == sum(len(t.memory_bytes) for t in timelines.values())


def test_labels_reach_the_arguments_of_forward_and_backward(tmp_path, timelines):
    path = tmp_path / "trace.json"
    labels = make_labels(2, 8, text='doc "7"\n</script>')
    del labels[0, "forward", 3]
    write_chrome_trace(path, timelines, labels)
    for event in read_trace(path)[0]["traceEvents"]:
        if event["ph"] == "X":
            args = event["args"]
            assert args["direction"] == ("forward" if "F" in event["name"] else "backward")
            if "tokens" in args:
                assert args["tokens"] == 4608 + args["pack"]
                assert args["content"] == 'doc "7"\n</script>'
            else:
                assert (args["direction"], args["pack"]) == ("forward", 3)
