"""From how many tokens on a shared prefix pays: found by pricing both ways."""

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import PassCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.shared_prefix import min_shared_tokens
from evenload.data.hub import model_from
from evenload.types.cluster import cluster_of
from evenload.types.layout import even_layout


def costs_of(windows: tuple[int, ...] = (), **changes: float) -> PackCosts:
    per_pass = {"linear_s_per_token": 1.0, "attention_s_per_pair": 0.1, "prefix_s_per_token": 0.5, "slice_s": 40.0}
    one = PassCoefficients(**(per_pass | changes))
    coefficients = sample_coefficients(forward=one, backward=one, head_s_per_token=0.0, embedding_s_per_token=0.0)
    return PackCosts(sample_model(sliding_windows=windows), coefficients, even_layout(3))


def seconds(costs: PackCosts, size: int, depth: int, *, is_shared: bool) -> float:
    """Of two segments of 50 tokens behind `size` common ones, behind `depth` others."""
    split, end = depth + size, depth + size + 50
    pieces = [(depth, split), (split, end), (split, end)] if is_shared else [(depth, end)] * 2
    start, stop = np.array(pieces).T
    return float(costs.piece_seconds(start, stop).sum())


@pytest.mark.parametrize("windows", [(), (0, 16, 16), (16, 16, 16), (0, -8, -8)])
@pytest.mark.parametrize("changes", [{}, {"slice_s": 0.0}, {"prefix_s_per_token": 2.0}, {"linear_s_per_token": 5.0}])
def test_from_so_many_tokens_on_sharing_is_faster(windows: tuple[int, ...], changes: dict) -> None:
    costs, longest = costs_of(windows, **changes), 4000
    least = min_shared_tokens(costs, longest)
    assert 1 <= least < longest

    def pays(size: int) -> bool:
        depths = [0, *2 ** np.arange(12)]
        return all(
            seconds(costs, size, depth, is_shared=True) <= seconds(costs, size, depth, is_shared=False) * (1 + 1e-12)
            for depth in depths
        )

    assert [pays(size) for size in range(1, 4 * least)] == [size >= least for size in range(1, 4 * least)]


def test_dearer_pieces_need_longer_prefixes() -> None:
    assert min_shared_tokens(costs_of(slice_s=0.0, prefix_s_per_token=0.0), 1000) == 1
    assert min_shared_tokens(costs_of(slice_s=4000.0), 10_000) > min_shared_tokens(costs_of(), 10_000)
    # What never pays is as if nothing were shared.
    assert min_shared_tokens(costs_of(slice_s=1e12), 1000) == 1000


def test_of_a_model_on_a_gpu() -> None:
    model = model_from("llama3-8b")
    layout = even_layout(model.num_layers, dp=8)
    costs = PackCosts(model, analytic_coefficients(model, cluster_of("h100", 8), layout), layout)
    assert 64 < min_shared_tokens(costs, 131_072) < 256
