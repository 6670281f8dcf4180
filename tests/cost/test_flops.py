import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_model
from evenload.cost.layer_counts import forward_flops, slice_pairs, training_flops
from evenload.types.work import causal_pairs


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40))
def test_pairs_equal_the_direct_sum(start: int, length: int, window: int) -> None:
    """A wrong closed form would shift every cut of every planner."""
    direct = sum(min(t + 1, window) if window else t + 1 for t in range(start, start + length))
    assert causal_pairs(start, start + length, window) == direct


def test_pairs_of_slices_add_up_to_the_document() -> None:
    edges = np.array([0, 1, 7, 128, 129, 1000])
    for window in (0, 1, 64, 5000):
        assert causal_pairs(edges[:-1], edges[1:], window).sum() == causal_pairs(0, 1000, window)


def test_bidirectional_pairs_are_the_whole_square() -> None:
    assert slice_pairs(np.array([0]), np.array([7]), causal=False) == [49]


def test_forward_flops_equal_hand_arithmetic() -> None:
    model = sample_model(num_layers=2)
    # attention 8·4·(2·2 + 2·1) = 192 weights, ffn 3·8·16 = 384, head 32·8 = 256
    linear = 2 * (2 * (192 + 384) + 256) * 5
    attention = 2 * 4 * 2 * 4 * (5 * 6 / 2)
    assert forward_flops(model, 5) == linear + attention
    assert training_flops(model, 5) == 3 * (linear + attention)


def test_forward_flops_count_windows_per_layer() -> None:
    full, mixed = sample_model(num_layers=2), sample_model(num_layers=2, sliding_windows=(0, 3))
    lost_pairs = causal_pairs(0, 10) - causal_pairs(0, 10, 3)
    assert forward_flops(full, 10) - forward_flops(mixed, 10) == pytest.approx(4 * 2 * 4 * lost_pairs)
