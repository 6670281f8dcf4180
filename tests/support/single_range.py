"""Attention of one range alone, as the backends' contract gives it for a pack of one; packs of random ranges."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from evenload.attention.range_attention import Gradients, RangeAttention, RangeSizes, Scoring, first_visible_key


def attend(backend: RangeAttention, q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """q [n, H, D], keys and values [s, G, D] -> output [n, H, D] and log-sum-exp [n, H]."""
    return backend.forward(q, [(keys, values)], RangeSizes([q.shape[0]], [keys.shape[0]]), scoring)


def attend_backward(
    backend: RangeAttention,
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    scoring: Scoring,
) -> Gradients:
    """Gradients of q [n, H, D], keys and values [s, G, D]."""
    sizes = RangeSizes([q.shape[0]], [keys.shape[0]])
    return backend.backward(grad, q, [(keys, values)], out, lse, sizes, scoring)


class RandomPack(NamedTuple):
    """q and grad [T, H, D]; keys and values of every range [s, G, D] and its rows; `sizes` are of a pack, once."""

    q: Tensor
    grad: Tensor
    seen: list[tuple[Tensor, Tensor]]
    rows: list[slice]
    sizes: RangeSizes


def random_pack(ranges, heads, groups, dim, window, seed, device="cpu") -> RandomPack:
    """(start, stop) ranges of documents of their own; bf16."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    keys = [stop - first_visible_key(start, window) for start, stop in ranges]
    seen = [(random(count, groups, dim), random(count, groups, dim)) for count in keys]
    sizes = RangeSizes([stop - start for start, stop in ranges], keys)
    edges = [sum(sizes.rows[:at]) for at in range(len(ranges) + 1)]
    # As transformers hands them over: heads first in memory.
    q, grad = (random(heads, edges[-1], dim).transpose(0, 1) for _ in range(2))
    return RandomPack(q, grad.contiguous(), seen, [slice(*pair) for pair in itertools.pairwise(edges)], sizes)


def backward_by_range(
    backend: RangeAttention, pack: RandomPack, out: Tensor, lse: Tensor, scoring: Scoring
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of every range's q, keys and values, of one backward of the pack."""
    dq, dk, dv = backend.backward(pack.grad, pack.q, pack.seen, out, lse, pack.sizes, scoring)
    rows, keys = pack.sizes.rows, pack.sizes.keys
    return list(zip(dq.split(rows), dk.split(keys), dv.split(keys), strict=True))
