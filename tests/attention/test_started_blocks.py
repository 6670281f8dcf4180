"""What is left of empty attention blocks, in shares of a layer's seconds: why no term of the price counts them. Usual
lengths lose less than half a percent, the worst mixes 0.8 % (8B) and 1.7 % (1.7B).

Seconds are estimates of an H100 (`RangeSizes`): an empty block of a head 2 ns forward and 5.5 ns backward, memory at
3.3 TB/s for copies of what several calls return, matrix products at 600 TFLOP/s; attention's own work is left out of
the layer, which makes shares larger than they are.
"""

import itertools

import numpy as np
import pytest

from evenload.attention.range_attention import BLOCK_ROWS, call_sizes
from evenload.types.model import MODELS

EMPTY_S = 2e-9 + 5.5e-9
COPIED_BYTES_PER_S, FLOPS_PER_S = 3.3e12, 600e12


def lost_share(model, tokens):
    """Seconds of empty blocks and copies over those of a layer's matrix products, forward and backward."""
    blocks = [-(-size // BLOCK_ROWS) for size in tokens]
    edges = list(itertools.pairwise(itertools.accumulate(call_sizes(blocks), initial=0)))
    started = sum((stop - start) * max(blocks[start:stop]) for start, stop in edges)
    kind = model.kinds[0]
    lost_s = (started - sum(blocks)) * kind.attention.heads * EMPTY_S
    if len(edges) > 1:
        # Read and written in bf16: output and dQ, dK and dV.
        width = 2 * kind.attention.heads + 2 * kind.attention.kv_heads
        lost_s += 4 * width * model.head_dim * sum(tokens) / COPIED_BYTES_PER_S
    return lost_s / (6 * kind.active_products * sum(tokens) / FLOPS_PER_S)


def usual_lengths(count, seed=0):
    """Log-normal with median 700, a tenth at the limit of 4,096."""
    lengths = np.random.default_rng(seed).lognormal(np.log(700), 0.9, count).clip(16, 4096)
    lengths[::10] = 4096
    return lengths.astype(int).tolist()


@pytest.mark.parametrize(("name", "most"), [("llama3-8b", 0.003), ("qwen3-1.7b", 0.006)])
def test_usual_lengths_lose_little(name, most):
    for count in (10, 50, 200):
        assert 0 < lost_share(MODELS[name], usual_lengths(count)) < most


@pytest.mark.parametrize(("name", "most"), [("llama3-8b", 0.01), ("qwen3-1.7b", 0.02)])
@pytest.mark.parametrize("longest", [8_192, 65_536, 262_144])
@pytest.mark.parametrize("place", ["first", "in the middle"])
def test_no_mix_of_one_long_document_and_short_ones_loses_much(name, most, longest, place):
    """In one call up to a third of a layer would be lost."""
    worst = 0.0
    for count, short in itertools.product((1, 3, 10, 30, 100, 300, 1000), (50, 200, 700, 2000)):
        at = 0 if place == "first" else count // 2
        tokens = [short] * count
        tokens.insert(at, longest)
        worst = max(worst, lost_share(MODELS[name], tokens))
    assert worst < most
