"""What sharding by predicted seconds is decided by: the work of a whole document, of both directions."""

import dataclasses

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.plan.sharing.cp_sharding import share_packs
from evenload.plan.sharing.sharding_cost import ShardingCost, sharding_cost
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.0)


@pytest.mark.parametrize("cp", [2, 3])
def test_work_is_that_of_one_rank_alone(cp) -> None:
    """However many ranks the layout has: pieces are priced whole and then assigned."""
    coefficients = sample_coefficients(intra_node=LINK, devices_per_node=8)
    found = sharding_cost(PackCosts(sample_model(), coefficients, even_layout(3, cp=cp)), cp)
    alone = PackCosts(sample_model(), coefficients, even_layout(3))
    expected = alone.document_seconds(np.array([7, 40]))
    ours = found.work.slice_works_s(np.zeros(2, np.int64), np.array([7, 40]))
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_transfers_are_those_of_the_group() -> None:
    coefficients = sample_coefficients(intra_node=LINK, devices_per_node=8)
    costs = PackCosts(sample_model(), coefficients, even_layout(3, dp=4, cp=2))
    alone, merged = (sharding_cost(costs, ranks) for ranks in (2, 8))
    # (n - 1) / n of a token's bytes come from others.
    assert merged.gather_s_per_token / alone.gather_s_per_token == pytest.approx((7 / 8) / (1 / 2))


def test_a_ring_sends_gradients_home_and_prefixes_with_every_slice() -> None:
    """A group of two: K and V (16 bytes a token) and their gradients (32) half of the way, gradients home once more."""
    found = []
    for exchange in ("all_gather", "ring"):
        coefficients = sample_coefficients(intra_node=LINK, devices_per_node=8, context_exchange=exchange)
        cost = sharding_cost(PackCosts(sample_model(), coefficients, even_layout(3, cp=2)), 2)
        per_token_s = 3 * ((16 + 16 + 32) / 2 + (16 if exchange == "ring" else 0)) / 1e6
        assert cost.gather_s_per_token == pytest.approx(per_token_s)
        slow = dataclasses.replace(cost, hidden_share=0.0)
        first, later = (
            share_packs("per_document", np.array([start]), np.array([start + 8]), 2, slow).rank_s.sum()
            - share_packs("per_document", np.array([start]), np.array([start + 8]), 2, free(slow)).rank_s.sum()
            for start in (0, 100)
        )
        found.append(later / first)
    assert found == pytest.approx([1.0, 108 / 8])


def free(cost: ShardingCost) -> ShardingCost:
    return dataclasses.replace(cost, gather_s_per_token=0.0)


def test_a_group_without_a_link_is_refused() -> None:
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3, dp=2))
    with pytest.raises(ConfigError, match="know no link for a group over 2 devices"):
        sharding_cost(costs, 2)
