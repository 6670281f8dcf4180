"""Rows kept together: every backward pack reads its own rows, and no slice is held longer than if kept alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.runtime.comm.tensor_group import RowShard
from evenload.runtime.replay.store import ActivationStore, BlockIndex
from evenload.types.document import ActivationPolicy, Range
from single_stage import packs_of

BYTES = 8


def ranges_of(pieces):
    return tuple(Range(*piece) for piece in pieces)


def rows_of(ranges, shard=None):
    """One number for each token, or for each own token of a tensor-parallel rank."""
    tokens = [(doc, position) for doc, start, stop in ranges for position in range(start, stop)]
    own = [t for t in tokens if shard is None or (t[0] + t[1]) % shard.size == shard.rank]
    return torch.tensor([1000.0 * doc + position for doc, position in own], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("shard", [None, RowShard(rank=1, size=3)], ids=["all rows", "own rows"])
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    cuts=st.tuples(*[st.lists(st.floats(0, 1), max_size=2)] * 2),
    budgets=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    recomputed=st.sets(st.integers(0, 7)),
)
def test_rows_come_back_and_are_freed_with_their_first_token(shard, lengths, cuts, budgets, recomputed):
    """Bytes after every backward are those of slices whose first token has not come back, as `cost.memory` predicts."""
    forward = [ranges_of(pack) for pack in packs_of(lengths, cuts[0], budgets[0], last_first=False)]
    backward = [ranges_of(pack) for pack in packs_of(lengths, cuts[1], budgets[1], last_first=True)]
    policies: dict[int, ActivationPolicy] = {doc: "recompute" for doc in recomputed if doc < len(lengths)}
    store = ActivationStore(dict(enumerate(lengths)), backward, policies=policies, shard=shard)
    for pack in forward:
        store.open_pack(pack)
        store.record("all", rows_of(pack))
        store.record("own", rows_of(pack, shard), is_own_rows=True)
        store.record_pack_keys(0, rows_of(pack)[:, None], -rows_of(pack)[:, None])
        store.close_pack()
    left = [piece for pack in forward for piece in pack]
    begun, done = set(range(len(lengths))), set()
    for pack in backward:
        assert torch.equal(store.read("all", pack), rows_of(pack))
        assert torch.equal(store.read("own", pack), rows_of(pack, shard))
        for doc, start, stop in pack:
            keys, values = store.keys_and_values(doc, 0, 0, stop)
            assert torch.equal(keys[:, 0], rows_of([(doc, 0, stop)]))
            assert torch.equal(values, -keys)
            keys, _ = store.keys_and_values(doc, 0, start, stop)
            assert torch.equal(keys[:, 0], rows_of([(doc, start, stop)]))
        store.close_backward(pack)
        starts = {doc: start for doc, start, _ in pack}
        left = [piece for piece in left if piece[1] < starts.get(piece[0], lengths[piece[0]])]
        done |= {doc for doc, start in starts.items() if start == 0}
        kept = sum(rows_of([piece]).nbytes + rows_of([piece], shard).nbytes for piece in left)
        assert store.held.held_bytes == kept + 2 * BYTES * sum(lengths[doc] for doc in begun - done)
    store.check_empty()


def test_a_forward_pack_inside_one_backward_pack_is_kept_uncut():
    """Recording copies nothing and neither does reading all of it, though the backward pack holds more."""
    store = ActivationStore({0: 4, 1: 3, 2: 5}, [((0, 0, 4), (1, 0, 3), (2, 0, 5))])
    rows, keys, values = torch.randn(7, 2), torch.randn(7, 1, 2), torch.randn(7, 1, 2)
    store.open_pack(ranges_of([(0, 0, 4), (1, 0, 3)]))
    store.record("x", rows)
    store.record_pack_keys(0, keys, values)
    assert store.read("x", ((0, 0, 4), (1, 0, 3))) is rows
    kept, _ = store.keys_and_values(1, 0, 0, 3)
    assert kept.data_ptr() == keys[4:].data_ptr()
    assert store.held.held_bytes == rows.nbytes + keys.nbytes + values.nbytes


def test_slices_are_one_block_only_if_freed_together_under_one_policy():
    backward = [((0, 0, 2), (1, 3, 6)), ((1, 0, 3), (2, 0, 2), (3, 0, 2), (4, 0, 2))]
    index = BlockIndex(backward, lambda doc: "recompute" if doc == 4 else "replay", None)
    blocks = index.open_pack(((0, 0, 2), (1, 0, 2), (2, 0, 2), (3, 0, 2), (4, 0, 2)))
    assert [block.ranges for block in blocks] == [((0, 0, 2),), ((1, 0, 2), (2, 0, 2), (3, 0, 2)), ((4, 0, 2),)]
    (part,) = index.parts(((2, 0, 2), (3, 0, 1)))
    assert (part.block, part.rows) == (blocks[1], slice(2, 5))
