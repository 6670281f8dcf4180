"""Chrome traces hold the timelines, and packs are labelled with their content."""

import dataclasses
import json
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest

import evenload.report.chrome_trace as pack_label
from evenload.report.chrome_trace import label_packs, write_chrome_trace
from evenload.types.document import Document, MicroPack, PackPlan, Slice
from evenload.types.layout import ParallelLayout
from evenload.types.plan import Prediction, Schedule, StepPlan
from evenload.types.timeline import MEMORY_KINDS
from report_samples import make_labels, make_timeline, side_tasks


@pytest.fixture
def timelines():
    return {"predicted": make_timeline(2, 4, 8), "measured": make_timeline(2, 4, 8, noise=0.2, split=True)}


def events_of(folder, timelines, labels=None):
    """Events of the trace by kind, and the names of processes and threads."""
    write_chrome_trace(folder / "trace.json", timelines, labels)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    tasks, counters, names = ([event for event in events if event["ph"] == kind] for kind in "XCM")
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    return tasks, counters, processes, threads


def test_events_are_the_tasks_in_microseconds(tmp_path, timelines):
    tasks, _, processes, threads = events_of(tmp_path, timelines)
    seen = {
        (processes[event["pid"]], threads[event["pid"], event["tid"]], event["name"]): (event["ts"], event["dur"])
        for event in tasks
    }
    assert len(seen) == sum(timeline.num_tasks for timeline in timelines.values())
    for name, t in timelines.items():
        for i in range(t.num_tasks):
            action = f"{t.stage[i]}{'FBIW'[t.kind[i]]}{t.pack[i]}"
            start_us, duration_us = seen[f"{name} dp {t.dp_rank[i]}", f"rank {t.rank[i]}", action]
            assert start_us == pytest.approx(t.start_s[i] * 1e6, abs=1e-3)
            assert duration_us == pytest.approx((t.end_s[i] - t.start_s[i]) * 1e6, abs=2e-3)


def test_tasks_that_touch_do_not_overlap_after_rounding(tmp_path, timelines):
    """Perfetto drops or nests complete events that overlap on a thread."""
    lanes = defaultdict(list)
    for event in events_of(tmp_path, timelines)[0]:
        lanes[event["tid"]].append((round(event["ts"] * 1000), round(event["dur"] * 1000)))
    touching = 0
    for spans in lanes.values():
        spans.sort()
        for (start, duration), (following, _) in pairwise(spans):
            assert start + duration <= following
            touching += start + duration == following
    assert touching > 50


def test_lanes_have_equal_names_in_every_process_and_ids_are_unique(tmp_path, timelines):
    _, _, processes, threads = events_of(tmp_path, timelines)
    assert list(processes.values()) == ["predicted dp 0", "predicted dp 1", "measured dp 0", "measured dp 1"]
    for pid in processes:
        assert [name for (p, _), name in threads.items() if p == pid] == [f"rank {rank}" for rank in range(4)]
    assert len({tid for _, tid in threads}) == len(threads)
    assert 0 not in processes
    assert 0 not in {tid for _, tid in threads}


def test_memory_counters_carry_every_sample(tmp_path, timelines):
    _, events, processes, _ = events_of(tmp_path, timelines)
    counters = defaultdict(list)
    for event in events:
        counters[processes[event["pid"]], event["name"]].append((event["ts"], event["args"]["bytes"]))
    t = timelines["measured"]
    chosen = (t.memory_dp_rank == 1) & (t.memory_rank == 2)
    samples = counters["measured dp 1", "memory bytes rank 2"]
    assert [num_bytes for _, num_bytes in samples] == t.memory_bytes[chosen].tolist()
    assert np.allclose([time for time, _ in samples], t.memory_time_s[chosen] * 1e6, atol=1e-3)
    assert sum(map(len, counters.values())) == sum(len(t.memory_bytes) for t in timelines.values())


def test_labels_reach_the_arguments_of_forward_and_backward(tmp_path, timelines):
    labels = make_labels(2, 8, text='doc "7"\n</script>')
    del labels[0, "forward", 3]
    for event in events_of(tmp_path, timelines, labels)[0]:
        args = event["args"]
        assert args["direction"] == ("forward" if "F" in event["name"] else "backward")
        if "tokens" in args:
            assert args["tokens"] == 4608 + args["pack"]
            assert args["content"] == 'doc "7"\n</script>'
        else:
            assert (args["direction"], args["pack"]) == ("forward", 3)


def with_details(timeline):
    """Recompute inside the first backward of rank 0, two hops under way at once, a copy, the end of the step."""
    first = int(np.flatnonzero((timeline.kind == 1) & (timeline.rank == 0) & (timeline.dp_rank == 0))[0])
    start_s = float(timeline.start_s[first])
    rows = [
        ("recompute", 0, -1, timeline.stage[first], timeline.pack[first], start_s, start_s + 1e-3),
        ("send_forward", 0, 1, 0, 0, 0.0, 3e-3),
        ("send_forward", 0, 1, 0, 1, 1e-3, 4e-3),
        ("send_forward", 0, 1, 0, 2, 3e-3, 5e-3),
        ("offload", 2, -1, 2, 5, 1e-3, 2e-3),
        ("reduction", 3, -1, -1, -1, timeline.end_s.max(), timeline.step_time_s),
    ]
    kinds = np.zeros((len(timeline.memory_bytes), len(MEMORY_KINDS)), np.int64)
    kinds[:, 0] = timeline.memory_bytes.min()
    kinds[:, 3] = timeline.memory_bytes - kinds[:, 0]
    critical = np.zeros(timeline.num_tasks, bool)
    critical[[0, first]] = True
    return dataclasses.replace(timeline, side=side_tasks(rows), memory_kind_bytes=kinds, is_critical=critical)


def test_side_tasks_have_their_lanes_and_the_critical_path_is_marked(tmp_path):
    tasks, _, _, threads = events_of(tmp_path, {"predicted": with_details(make_timeline(2, 4, 8))})
    lanes = defaultdict(list)
    for event in tasks:
        lanes[event["pid"], threads[event["pid"], event["tid"]]].append(event)
    assert [event["name"] for event in lanes[1, "rank 0 to 1"]] == ["send_forward 0.0", "send_forward 0.2"]
    assert [event["name"] for event in lanes[1, "rank 0 to 1 (2)"]] == ["send_forward 0.1"]
    assert [event["name"] for event in lanes[1, "rank 2 copies"]] == ["offload 2.5"]
    assert "reduction" in [event["name"] for event in lanes[1, "rank 3 sums"]]
    assert len({tid for _, tid in threads}) == len(threads)
    (recompute,) = [event for event in lanes[1, "rank 0"] if event["cat"] == "recompute"]
    (outer,) = [e for e in lanes[1, "rank 0"] if e["ts"] == recompute["ts"] and e["dur"] > recompute["dur"]]
    names = [event["name"] for event in tasks]
    assert names.index(outer["name"]) < names.index(recompute["name"]), "viewers nest what comes later"
    critical = [event for event in tasks if "critical" in event["cat"]]
    assert len(critical) == 2
    assert all(event["args"]["critical"] is True for event in critical)


def test_memory_kinds_are_counters_that_add_up_with_what_never_changes(tmp_path):
    timeline = with_details(make_timeline(2, 4, 8))
    events = [event for event in events_of(tmp_path, {"predicted": timeline})[1] if event["pid"] == 1]
    totals = [event["args"]["bytes"] for event in events if event["name"] == "memory bytes rank 2"]
    moving = [event["args"] for event in events if event["name"] == "memory kinds rank 2"]
    assert set(moving[0]) == {"activations_replay"}
    constant = int(timeline.memory_bytes.min())
    assert [constant + args["activations_replay"] for args in moving] == totals


def make_plan() -> StepPlan:
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate([10, 20_000, 5]))
    short, begin, rest, last, long = (
        Slice(doc_id=doc_id, start=start, stop=stop)
        for doc_id, start, stop in ((0, 0, 10), (1, 0, 4096), (1, 4096, 20_000), (2, 0, 5), (1, 0, 20_000))
    )
    forward, backward = (
        tuple(MicroPack(index=i, direction=way, slices=slices) for i, slices in enumerate(packs))
        for way, packs in (("forward", ((short, begin), (rest, last))), ("backward", ((last, long),)))
    )
    return StepPlan(
        step=0,
        strategy="auto",
        layout=ParallelLayout(stage_layers=((0, 2),), stage_to_rank=(0,)),
        documents=documents,
        num_label_tokens=20_012,
        pack_plans=(PackPlan(dp_rank=3, forward=forward, backward=backward),),
        schedules=(Schedule(ranks=((),)),),
        times=(),
        predicted=Prediction(step_time_s=1.0, per_replica_s=(1.0,), peak_memory_bytes=0),
    )


def test_labels_count_documents_pieces_and_tokens():
    labels = label_packs(make_plan())
    assert set(labels) == {(3, "forward", 0), (3, "forward", 1), (3, "backward", 0)}
    cut = {"tokens": 4106, "documents": 2, "slices": 1, "content": "doc 0 (10), 1 [0, 4096) of 20.0K"}
    whole = {"tokens": 20_005, "documents": 2, "slices": 0, "content": "doc 2 (5), 1 (20.0K)"}
    assert (labels[3, "forward", 0], labels[3, "backward", 0]) == (cut, whole)


def test_long_packs_list_only_the_first_documents(monkeypatch):
    monkeypatch.setattr(pack_label, "MAX_DOCUMENTS", 1)
    content = label_packs(make_plan())[3, "forward", 1]["content"]
    assert content == "doc 1 [4096, 20000) of 20.0K, 1 more"
