"""What the page unpacks is what was put in: the Python side of packed_columns.js and step_blocks.py."""

import base64
import gzip
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.report.step_view import pack_columns, plan_block, timeline_block
from evenload.types.timeline import MEMORY_KINDS
from report_samples import make_plan, make_timeline, with_details


def unpack(text, directory):
    content, columns, at = gzip.decompress(base64.b64decode(text)), {}, 0
    for name, kind, length in directory:
        dtype = np.dtype(f"<{kind}")
        assert at % dtype.itemsize == 0, "a browser refuses columns that are not aligned"
        columns[name] = np.frombuffer(content, dtype, length, at)
        at += length * dtype.itemsize
    assert at == len(content)
    return columns


@given(
    st.lists(
        st.one_of(
            st.lists(st.integers(-(2**53), 2**53), max_size=9),
            st.lists(st.integers(0, 300), max_size=9),
            st.lists(st.integers(-200, 200), max_size=9),
        ),
        max_size=6,
    )
)
def test_columns_come_back_as_they_went(columns):
    named = {f"c{i}": np.array(column, np.int64) for i, column in enumerate(columns)}
    result = unpack(*pack_columns(named))
    assert set(result) == set(named)
    for name, column in named.items():
        assert result[name].tolist() == column.tolist()


def test_columns_take_the_narrowest_type():
    _, directory = pack_columns({"a": [0, 255], "b": [0, 256], "c": [-1, 127], "d": [2**31], "e": [2**40], "f": [0.5]})
    assert {name: kind for name, kind, _ in directory} == {
        "a": "u1", "b": "u2", "c": "i1", "d": "u4", "e": "f8", "f": "f8",
    }  # fmt: skip


def decode(timeline):
    """(dp, rank, kind, stage, pack, start_s, end_s, on the critical path) of every task, as the page computes them."""
    text, meta = timeline_block(timeline)
    c = unpack(text, meta["columns"])
    tasks, samples, task, sample = [], [], 0, 0
    for lane, (dp, rank) in enumerate(zip(c["laneDp"].tolist(), c["laneRank"].tolist(), strict=True)):
        units = 0
        for i in range(task, task + int(c["laneTasks"][lane])):
            start = units + int(c["gap"][i])
            units = start + int(c["length"][i])
            times = (start * meta["unitS"], units * meta["unitS"])
            tasks.append((dp, rank, *(int(c[k][i]) for k in ("kind", "stage", "pack")), *times, int(c["critical"][i])))
        task += int(c["laneTasks"][lane])
        units, held = 0, {name: 0 for name in c if name.startswith("kib")}
        for k in range(int(c["laneSamples"][lane])):
            units += int(c["sampleGap"][sample + k])
            held = {name: kib + int(c[name][sample + k]) for name, kib in held.items()}
            samples.append((dp, rank, units * meta["unitS"], {name: kib * 1024 for name, kib in held.items()}))
        sample += int(c["laneSamples"][lane])
    return tasks, samples, meta


@pytest.mark.parametrize("split", [False, True])
def test_timeline_block_holds_every_task_and_sample(split):
    t = make_timeline(2, 4, 8, split=split, noise=0.3, critical=[3, 5])
    tasks, samples, meta = decode(t)
    order = sorted(range(t.num_tasks), key=lambda i: (t.dp_rank[i], t.rank[i], t.start_s[i]))
    assert [task[:5] for task in tasks] == [(t.dp_rank[i], t.rank[i], t.kind[i], t.stage[i], t.pack[i]) for i in order]
    assert np.allclose([task[5] for task in tasks], t.start_s[order], rtol=0, atol=0.51e-9)
    assert np.allclose([task[6] for task in tasks], t.end_s[order], rtol=0, atol=0.51e-9)
    assert [i for i, task in zip(order, tasks, strict=True) if task[7]] == sorted([3, 5], key=order.index)
    assert meta["unitS"] == 1e-9
    assert meta["stepTimeS"] == t.step_time_s
    assert meta["bubble"] == t.bubble_fraction()
    order = np.lexsort((t.memory_rank, t.memory_dp_rank))
    assert np.allclose([s[2] for s in samples], t.memory_time_s[order], rtol=0, atol=0.51e-9)
    assert np.allclose([s[3]["kib"] for s in samples], t.memory_bytes[order], rtol=0, atol=512)


def test_details_of_a_prediction_come_back():
    t = with_details(make_timeline(2, 4, 8, noise=0.3))
    _, samples, meta = decode(t)
    assert np.allclose([s[2] for s in samples], t.memory_time_s, rtol=0, atol=0.51e-9)
    assert meta["memoryKinds"] == [MEMORY_KINDS[0], MEMORY_KINDS[4]]
    assert [sum(s[3].values()) for s in samples] == t.memory_bytes.tolist()
    assert [list(s[3].values()) for s in samples] == t.memory_kind_bytes[:, [0, 4]].tolist()
    assert meta["tail"] == [("reduction", t.end_s.max(), t.step_time_s)]
    c = unpack(timeline_block(t)[0], meta["columns"])
    # Recompute twice and one reload; the hop is not drawn.
    assert int(c["laneSides"].sum()) == len(c["sideKind"]) == 3
    assert sorted(c["sideLength"].tolist()) == [1_000_000, 1_000_000, 2_000_000]


def test_touching_tasks_still_touch_and_long_steps_take_a_coarser_unit():
    """Separate rounding of start and length would open gaps of a unit, which look like waiting."""
    t = make_timeline(1, 1, 40)
    t.start_s[:] *= 1000 / 3
    t.end_s[:] *= 1000 / 3
    tasks, _, meta = decode(t)
    assert meta["unitS"] == 1e-6  # 600 s are more than int32 of anything finer
    assert all(a[6] == b[5] for a, b in itertools.pairwise(tasks))


def test_an_empty_replica_is_no_error():
    t = make_timeline(1, 2, 2, memory=False)
    empty = np.zeros(0, int)
    for name in ("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s"):
        object.__setattr__(t, name, empty.astype(getattr(t, name).dtype))
    assert decode(t)[:2] == ([], [])


def test_plan_block_holds_every_slice_policy_and_document_left_out():
    plan = make_plan(2, 3, reason="dropped: longer than 5")
    text, meta = plan_block(plan)
    c = unpack(text, meta["columns"])
    result, slices = (
        [],
        iter(zip(*(c[f"slice{name}"].tolist() for name in ("Doc", "Start", "Length", "Cp")), strict=True)),
    )
    packs = zip(*(c[f"pack{name}"].tolist() for name in ("Dp", "Direction", "Index", "Slices")), strict=True)
    for *pack, count in packs:
        for doc, start, length, cp in itertools.islice(slices, count):
            document = int(c["docId"][doc]), int(c["docTokens"][doc])
            result.append((*pack, *document, start, start + length, cp))
    tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    assert result == [
        (r.dp_rank, d, pack.index, piece.doc_id, tokens[piece.doc_id], piece.start, piece.stop, piece.cp)
        for r in plan.pack_plans
        for d, packs in enumerate((r.forward, r.backward))
        for pack in packs
        for piece in pack.slices
    ]
    named = dict(zip(c["docId"].tolist(), (meta["policies"][i] for i in c["docPolicy"].tolist()), strict=True))
    assert {doc_id for doc_id, policy in named.items() if policy == "recompute"} == {800, 801}
    assert set(named.values()) == {"replay", "recompute"}
    assert meta["leftOut"] == ["7 (of length 99): dropped: longer than 5"]


def test_a_large_step_takes_few_bytes_a_task():
    t = make_timeline(1, 16, 512)
    text, _ = timeline_block(t)
    assert len(text) < 14 * t.num_tasks
