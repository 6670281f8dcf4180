"""Attention of one range alone, as the backends' contract gives it for a pack of one."""

import torch
from torch import Tensor

from evenload.attention.range_attention import KeyRange, RangeAttention, RangeGradients, Scoring, first_visible_key


def attend(backend: RangeAttention, q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """q [n, H, D], keys and values [s, G, D] -> output [n, H, D] and log-sum-exp [n, H]."""
    return backend.forward(q, [KeyRange(slice(0, q.shape[0]), keys, values)], scoring)


def attend_backward(
    backend: RangeAttention,
    grad: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    scoring: Scoring,
) -> RangeGradients:
    """Gradients of q [n, H, D], keys and values [s, G, D]."""
    [gradients] = backend.backward(grad, q, [KeyRange(slice(0, q.shape[0]), keys, values)], out, lse, scoring)
    return gradients


def random_pack(ranges, heads, groups, dim, window, seed, device="cpu"):
    """Queries, gradient and `KeyRange`s of (start, stop) ranges of documents of their own; bf16."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    seen, row = [], 0
    for start, stop in ranges:
        keys, rows = stop - first_visible_key(start, window), slice(row, row + stop - start)
        seen.append(KeyRange(rows, random(keys, groups, dim), random(keys, groups, dim)))
        row = rows.stop
    # As transformers hands them over: heads first in memory.
    q, grad = (random(heads, row, dim).transpose(0, 1) for _ in range(2))
    return q, grad.contiguous(), seen
