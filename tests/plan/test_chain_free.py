"""Of the Python reference; `test_replica_search` holds the core's cuts to it, to the token."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.types.columns import SliceColumns, WorkCurve
from reference.chain_free import chain_free_columns

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
