"""Groups of ranks for Megatron's dynamic context parallelism: complete, within room, equal counts, and never slow."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.engines.context_groups import GroupPrices, groups_of, step_seconds
from evenload.engines.placed_groups import fastest_groups, plan_placed_groups
from evenload.errors import InfeasiblePlanError


def prices_of(lengths, num_ranks=4, room_tokens=16, pack_s=2.0) -> GroupPrices:
    """A document takes its tokens over the ranks that share it, and 3 s for every doubling of them."""
    sizes = tuple(1 << power for power in range(num_ranks.bit_length()))
    tokens = np.array(lengths, np.int64)
    seconds = np.array([tokens / size + 3.0 * power for power, size in enumerate(sizes)])
    return GroupPrices(
        num_tokens=tokens, sizes=sizes, seconds=seconds, pack_s=pack_s, num_ranks=num_ranks, room_tokens=room_tokens
    )


def require_valid(prices, found, multiple=1) -> None:
    assert len(found) % multiple == 0
    documents = []
    for ranks in found:
        assert len(ranks) == prices.num_ranks
        assert all(ranks)
        for first, size, shared in groups_of(ranks):
            assert size in prices.sizes
            assert first % size == 0
            assert prices.share_tokens(size)[list(shared)].sum() <= prices.room_tokens
            documents += shared
    assert sorted(documents) == list(range(len(prices.num_tokens)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=4, max_size=14),
    num_ranks=st.sampled_from([1, 2, 4]),
    multiple=st.sampled_from([1, 2]),
)
def test_every_document_once_every_rank_busy_within_its_room(lengths, num_ranks, multiple):
    prices = prices_of([min(length, 15 * num_ranks) for length in lengths], num_ranks)
    found = plan_placed_groups(prices, multiple)
    if found is not None:
        require_valid(prices, found, multiple)
    try:
        fastest = fastest_groups(prices, multiple)
    except InfeasiblePlanError:
        # Five documents of which no two fit a rank fill five micro-batches, and no even number of them.
        assert multiple > 1
        assert found is None
        return
    require_valid(prices, fastest, multiple)
    assert found is None or step_seconds(prices, fastest) <= step_seconds(prices, found)


def test_by_hand_one_document_each():
    """Four equal documents on four ranks: one each, at once."""
    prices = prices_of([12, 12, 12, 12])
    found = plan_placed_groups(prices)
    assert found is not None
    assert len(found) == 1
    assert step_seconds(prices, found) == pytest.approx(2.0 + 12.0)


def test_by_hand_a_long_document_beside_short_ones():
    """28 tokens fit two ranks only; the short ones go to the others."""
    prices = prices_of([28, 10, 10])
    found = plan_placed_groups(prices)
    assert found is not None
    assert sorted(size for _, size, _ in groups_of(found[0])) == [1, 1, 2]
    assert step_seconds(prices, found) == pytest.approx(2.0 + 28 / 2 + 3.0)


def test_a_document_beyond_all_ranks_has_no_place():
    assert plan_placed_groups(prices_of([100, 3])) is None
    assert plan_placed_groups(prices_of([])) == ()
