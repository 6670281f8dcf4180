"""Of the Python reference; `test_replica_search` holds the core's cuts to it, to the token."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.types.columns import SliceColumns, WorkCurve
from reference.chain_free import chain_free_columns
from reference.partition import partition_by_work
from reference.slice_work import slice_work_s, slice_works_s

LINEAR = WorkCurve(linear_s=1.0)
CAUSAL = WorkCurve(linear_s=1.0, attention_s=((0.01, 0),), slice_s=0.5)


def rows(columns: SliceColumns) -> list[list[tuple[int, int, int]]]:
    flat = list(zip(columns.doc.tolist(), columns.start.tolist(), columns.stop.tolist(), strict=True))
    edges = columns.pack_offset.tolist()
    return [flat[lo:hi] for lo, hi in itertools.pairwise(edges)]


def partition(lengths, num_packs, work=LINEAR, order=None, **options) -> list[list[tuple[int, int, int]]]:
    sequence = np.arange(len(lengths), dtype=np.int32) if order is None else np.array(order, dtype=np.int32)
    return rows(partition_by_work(np.array(lengths, dtype=np.int64), sequence, work, num_packs, **options))


def test_cap_leaves_no_pack_above_the_first_share():
    """A long document carries the work, short ones the tokens: capped packs must not make a later pack heavier."""
    work = WorkCurve(linear_s=1.0, attention_s=((0.1, 0),))
    lengths = [400] + [1] * 400
    packs = partition(lengths, 4, work, order=[*range(200, 401), *range(200)], max_pack_tokens=150)
    seconds = [sum(slice_work_s(work, a, b) for _, a, b in pack) for pack in packs]
    share = sum(slice_work_s(work, 0, n) for n in lengths) / 4
    assert max(seconds) <= 1.03 * share  # one boundary token of the long document is worth 41 s
    assert max(sum(b - a for _, a, b in pack) for pack in packs) <= 150


def check(lengths, order, columns, *, align, min_slice, cap, last_first) -> None:
    seen: dict[int, int] = {}
    visited: list[int] = []
    for pack in rows(columns):
        assert pack, "empty pack"
        assert sum(b - a for _, a, b in pack) <= cap
        assert len({doc for doc, _, _ in pack}) == len(pack), "two slices of one document in a pack"
        for doc, start, stop in pack:
            assert start < stop
            if doc not in seen:
                visited.append(doc)
                seen[doc] = lengths[doc] if last_first else 0
            assert (stop if last_first else start) == seen[doc]
            seen[doc] = start if last_first else stop
            assert (start == 0 and stop == lengths[doc]) or stop - start >= min_slice
            for edge in (start, stop):
                assert edge % align == 0 or edge == lengths[doc]
    assert visited == list(order)
    assert all(seen[doc] == (0 if last_first else lengths[doc]) for doc in order)


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=25),
    num_packs=st.integers(1, 30),
    align=st.sampled_from([1, 1, 3, 16]),
    min_slice=st.sampled_from([1, 1, 2, 20]),
    cap=st.none() | st.integers(60, 400),
    last_first=st.booleans(),
    work=st.builds(
        WorkCurve,
        linear_s=st.sampled_from([0.0, 1.0, 0.3]),
        attention_s=st.sampled_from([(), ((0.1, 0),), ((0.02, 0), (0.3, 16))]),
        slice_s=st.sampled_from([0.0, 5.0]),
    ),
    seed=st.integers(0, 99),
)
def test_any_partition_covers_once_keeps_order_and_cap(
    lengths, num_packs, align, min_slice, cap, last_first, work, seed
):
    order = np.random.default_rng(seed).permutation(len(lengths)).astype(np.int32)
    options = {"align": align, "min_slice_tokens": min_slice, "max_pack_tokens": cap, "last_first": last_first}
    column = np.array(lengths, dtype=np.int64)
    columns = partition_by_work(column, order, work, num_packs, **options)
    check(lengths, order, columns, align=align, min_slice=min_slice, cap=cap or 10**9, last_first=last_first)
    if cap is None:
        assert columns.num_packs <= num_packs


@pytest.mark.parametrize("last_first", [False, True])
def test_real_like_lengths_are_balanced(last_first):
    """512 lognormal documents up to 128K tokens, cuts on 128: within 1 % of equal work."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(7.0, 1.6, 512).astype(np.int64) + 1, 131_072)
    work = WorkCurve(linear_s=1e-6, attention_s=((4e-11, 0),))
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    columns = partition_by_work(lengths, order, work, 32, align=128, min_slice_tokens=128, last_first=last_first)
    seconds = columns.pack_sums(np.array(slice_works_s(work, columns)))
    assert columns.num_packs == 32
    assert seconds.max() / seconds.mean() <= 1.01
    assert columns.num_slices - len(lengths) <= 31, "more cuts than pack borders"


def test_cut_is_the_nearest_boundary():
    """Brute force over every boundary of one document: the first pack ends nearest to half of the work."""
    for last_first in (False, True):
        for n in range(2, 60):
            [first, *_] = partition([n], 2, CAUSAL, last_first=last_first)
            half = slice_work_s(CAUSAL, 0, n) / 2
            miss = {t: abs(slice_work_s(CAUSAL, *((n - t, n) if last_first else (0, t))) - half) for t in range(1, n)}
            assert miss[first[0][2] - first[0][1]] == min(miss.values())


CURVES = (WorkCurve(1.0, ((0.01, 0),)), WorkCurve(2.0, ((0.025, 0), (0.5, 7)), 0.1))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 20), st.integers(1, 3000)), min_size=1, max_size=12),
    st.integers(1, 24),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 5]),
    st.sampled_from([None, 3000, 700]),
)
def test_packs_are_symmetric_ordered_and_without_chains(
    lengths: list[int], num_packs: int, align: int, min_slice_tokens: int, cap: int | None
) -> None:
    """A chain (a document waiting for the middle of another) would force the whole chain into LIFO."""
    result = chain_free_columns(
        np.array(lengths), CURVES, num_packs, align=align, min_slice_tokens=min_slice_tokens, max_pack_tokens=cap
    )
    if result is None:
        assert cap is not None
        return
    forward, backward = map(rows, result)
    assert sorted(map(sorted, forward)) == sorted(map(sorted, backward))  # the same packs in both directions
    edge = dict.fromkeys(range(len(lengths)), 0)
    for pack in forward:
        assert pack
        for doc, start, stop in pack:
            assert start == edge[doc]
            assert stop > start
            edge[doc] = stop
        assert len({doc for doc, _, _ in pack}) == len(pack)
        assert cap is None or sum(stop - start for _, start, stop in pack) <= cap
        # Chain-free: a pack with a slice that its document continues after holds nothing else.
        if any(stop < lengths[doc] for doc, _, stop in pack):
            assert len(pack) == 1
    assert edge == dict(enumerate(lengths))
    for pack in backward:
        for doc, start, stop in pack:
            assert stop == edge[doc]
            edge[doc] = start
    assert not any(edge.values())
    for doc, length in enumerate(lengths):
        mine = [stop - start for pack in forward for d, start, stop in pack if d == doc]
        assert len(mine) == 1 or min(mine) >= min_slice_tokens
        assert all(start % align == 0 for pack in forward for d, start, _ in pack if d == doc)
        assert sum(mine) == length
