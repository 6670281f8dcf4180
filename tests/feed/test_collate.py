import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.data.blocks import TokenTable
from evenload.errors import InvalidPlanError
from evenload.feed.collate import IGNORE_INDEX, collate_pack, collate_ranges
from evenload.types.document import MicroPack, PackPlan, Slice


def pack_of(*slices, index=0, direction="forward", pad_to=0):
    return MicroPack(
        index=index,
        direction=direction,
        slices=tuple(Slice(doc_id=doc, start=start, stop=stop) for doc, start, stop in slices),
        pad_to=pad_to,
    )


def test_example_of_the_docstring():
    tokens = {7: np.array([5, 6, 7, 8, 9], np.int32), 8: np.array([1, 2], np.int32)}
    plan = PackPlan(
        dp_rank=0,
        forward=(pack_of((7, 0, 3)), pack_of((7, 3, 5), (8, 0, 2), index=1)),
        backward=(
            pack_of((7, 3, 5), (8, 0, 2), direction="backward"),
            pack_of((7, 0, 3), index=1, direction="backward"),
        ),
    )
    first, second, *backward = [collate_pack(pack, tokens) for pack in (*plan.forward, *plan.backward)]
    assert first.token_ids.tolist() == [5, 6, 7]
    assert first.targets.tolist() == [6, 7, 8]
    assert second.token_ids.tolist() == [8, 9, 1, 2]
    assert second.targets.tolist() == [9, IGNORE_INDEX, 2, IGNORE_INDEX]
    assert second.positions.tolist() == [3, 4, 0, 1]
    assert second.cu_seqlens_q.tolist() == [0, 2, 4]
    assert second.cu_seqlens_k.tolist() == [0, 5, 7]
    assert (second.max_seqlen_q, second.max_seqlen_k) == (2, 5)
    assert (second.num_padding_tokens, second.num_tokens) == (0, 4)
    assert second.doc_ids.tolist() == [7, 8]
    assert second.starts.tolist() == [3, 0]
    assert second.stops.tolist() == [5, 2]
    assert [pack.token_ids.tolist() for pack in backward] == [[8, 9, 1, 2], [5, 6, 7]]
    for pack in (first, second):
        for name in ("token_ids", "targets", "positions", "starts", "stops", "doc_ids"):
            assert getattr(pack, name).dtype == np.int64
        assert pack.cu_seqlens_q.dtype == pack.cu_seqlens_k.dtype == np.int32
        assert type(pack.max_seqlen_q) is type(pack.max_seqlen_k) is int


@given(st.data())
def test_cut_documents_have_the_targets_of_whole_ones(data):
    """Whatever the cuts and packs, each (document, position) has one id and target: those of the whole document."""
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    tokens = {
        10 + doc: np.array(data.draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)), np.int32)
        for doc, n in enumerate(sizes)
    }
    packs: list[list[tuple[int, int, int]]] = []
    for doc, content in tokens.items():
        cuts = sorted(data.draw(st.sets(st.integers(1, len(content)), max_size=3)) | {0, len(content)})
        first = data.draw(st.integers(0, 2))
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            while len(packs) <= first + number:
                packs.append([])
            packs[first + number].append((doc, start, stop))
    pad = data.draw(st.integers(0, 5))
    seen = {}
    labels = 0
    for slices in filter(None, packs):
        pad_to = pad and max(stop - start for _, start, stop in slices) + pad - 1
        batch = collate_pack(pack_of(*slices, pad_to=pad_to), tokens)
        labels += (batch.targets != IGNORE_INDEX).sum()
        at = 0
        for row, (doc, start, stop) in enumerate(slices):
            computed = pad_to or stop - start
            assert (batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1]) == (at, at + computed)
            assert batch.cu_seqlens_k[row + 1] - batch.cu_seqlens_k[row] == start + computed == batch.stops[row]
            for position in range(start, start + computed):
                entry = (batch.token_ids[at].item(), batch.targets[at].item(), batch.positions[at].item())
                if position < stop:
                    assert (doc, position) not in seen
                    seen[doc, position] = entry
                else:
                    assert entry == (0, IGNORE_INDEX, position)
                at += 1
        assert batch.num_tokens == at
        assert batch.num_padding_tokens == at - sum(stop - start for _, start, stop in slices)
        assert batch.max_seqlen_q == max(np.diff(batch.cu_seqlens_q))
        assert batch.max_seqlen_k == max(np.diff(batch.cu_seqlens_k))
    expected = {}
    for doc, content in tokens.items():
        values = content.tolist()
        for position, (token, target) in enumerate(zip(values, [*values[1:], IGNORE_INDEX], strict=True)):
            expected[doc, position] = (token, target, position)
    assert seen == expected
    assert labels == sum(sizes) - len(sizes)


@pytest.mark.parametrize(
    ("pack", "why"),
    [
        (pack_of(), "no slices"),
        (pack_of((1, 0, 4)), r"\[0, 4\) of document 1.*3 tokens"),
        (pack_of((1, 2, 2)), "document 1"),
        (pack_of((1, -1, 2)), "document 1"),
        (pack_of((2, 0, 1)), "document 2.*no tokens"),
        (pack_of((1, 0, 3), pad_to=2), "padded to 2"),
    ],
)
def test_slices_that_do_not_fit_the_batch_are_refused(pack, why):
    with pytest.raises(InvalidPlanError, match=why):
        collate_pack(pack, {1: np.arange(3, dtype=np.int32)})


def test_labels_that_differ_from_tokens_become_targets_in_any_ranges():
    """A prompt's tokens must carry no loss, wherever the document is cut, also in the rows of a shared pack."""
    tokens = np.array([5, 6, 7, 8, 9, 1, 2, 3], np.int32)
    labels = np.array([-100, -100, -100, 8, 9, -100, -100, 77], np.int32)
    table = TokenTable(np.array([4, 2]), np.array([0, 5, 8]), tokens, labels)
    whole = collate_pack(pack_of((4, 0, 5), (2, 0, 3)), table)
    assert whole.token_ids.tolist() == tokens.tolist()
    assert whole.targets.tolist() == [-100, -100, 8, 9, -100, -100, 77, -100]
    ids, targets, positions = collate_ranges([4, 2, 4], np.array([1, 1, 3]), np.array([3, 4, 5]), table)
    assert ids.tolist() == [6, 7, 2, 3, 0, 8, 9]
    assert targets.tolist() == [-100, 8, 77, -100, -100, 9, -100]
    assert positions.tolist() == [1, 2, 1, 2, 3, 3, 4]
    with pytest.raises(InvalidPlanError, match="document 9 has no tokens"):
        collate_ranges([9], np.array([0]), np.array([1]), table)
