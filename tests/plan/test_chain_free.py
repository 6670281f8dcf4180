"""Of the Python reference; `test_replica_search` holds the core's cuts to it, to the token."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns, WorkCurve
from evenload.types.layout import even_layout
from reference.chain_free import chain_free_columns, work_below

CURVES = (WorkCurve(1.0, ((0.01, 0),)), WorkCurve(2.0, ((0.025, 0), (0.5, 7)), 0.1))


def pieces(columns: SliceColumns) -> list[list[tuple[int, int, int]]]:
    rows = list(zip(columns.doc.tolist(), columns.start.tolist(), columns.stop.tolist(), strict=True))
    edges = columns.pack_offset.tolist()
    return [rows[lo:hi] for lo, hi in itertools.pairwise(edges)]


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
    found = chain_free_columns(
        np.array(lengths), CURVES, num_packs, align=align, min_slice_tokens=min_slice_tokens, max_pack_tokens=cap
    )
    if found is None:
        assert cap is not None
        return
    forward, backward = map(pieces, found)
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


def test_slim_packs_hold_the_target_work() -> None:
    lengths = np.array([9000, 50, 40, 30, 20, 10])
    found = chain_free_columns(lengths, CURVES, 8)
    assert found is not None
    target = work_below(CURVES, lengths).sum() / 8
    slim = pieces(found[0])[:6]
    for ((doc, start, stop),) in slim:
        assert doc == 0
        work = work_below(CURVES, np.array([stop])) - work_below(CURVES, np.array([start]))
        assert abs(work[0] / target - 1) < 0.01


def test_work_below_agrees_with_the_curve() -> None:
    costs = PackCosts(sample_model(sliding_windows=(0, 5, 5)), sample_coefficients(), even_layout(3))
    curve = costs.backward_work()
    tokens = np.array([1, 4, 5, 6, 100])
    np.testing.assert_allclose(work_below((curve,), tokens), curve.slice_works_s(np.zeros_like(tokens), tokens))
