"""Attention of one range alone, as the backends' contract gives it for a pack of one."""

from torch import Tensor

from evenload.attention.range_attention import KeyRange, RangeAttention, RangeGradients, Scoring


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
