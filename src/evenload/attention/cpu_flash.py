"""Range attention on the CPU's flash kernel.

The aten kernel is aligned top-left: its causal mask is right only for as many queries as keys. So a slice with a prefix
is two calls, prefix (no mask) and square (causal), merged through their log-sum-exps; backward is two calls that both
get the *merged* output and log-sum-exp. GQA needs no copy of K and V: they are expanded with stride 0. Packs in which a
sliding window hides keys are `reference`'s, which goes by blocks of rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from evenload.attention.range_attention import (
    Gradients,
    KeyParts,
    RangeSizes,
    Scoring,
    keys_by_range,
    merge_into,
    work_dtype,
)
from evenload.attention.reference import ReferenceAttention

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_REFERENCE = ReferenceAttention()


class CpuFlashAttention:
    """fp64, fp32 and bf16."""

    name = "cpu_flash"
    reason = ""

    def forward(self, q: Tensor, seen: KeyParts, sizes: RangeSizes, scoring: Scoring) -> tuple[Tensor, Tensor]:
        if _hides_keys(sizes, scoring):
            return _REFERENCE.forward(q, seen, sizes, scoring)
        groups = seen[0][0].shape[1]
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=work_dtype(q))
        pieces = (_by_group(tensor, groups).split(sizes.rows, dim=2) for tensor in (q, out, lse))
        for (keys, values), piece_q, *into in zip(keys_by_range(seen, sizes), *pieces, strict=True):
            for piece, made in zip(into, _forward_range(piece_q, keys, values, scoring), strict=True):
                piece.copy_(made)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, seen: KeyParts, out: Tensor, lse: Tensor, sizes: RangeSizes, scoring: Scoring
    ) -> Gradients:
        if _hides_keys(sizes, scoring):
            return _REFERENCE.backward(grad, q, seen, out, lse, sizes, scoring)
        groups, dim = seen[0][0].shape[1:]
        dq = torch.empty_like(q)
        dk, dv = (lse.new_empty(sizes.num_keys, groups, dim) for _ in range(2))
        pieces = (_by_group(tensor, groups).split(sizes.rows, dim=2) for tensor in (grad, q, out, lse, dq))
        into = zip(dk.split(sizes.keys), dv.split(sizes.keys), strict=True)
        for own, own_grads, *given, piece_dq in zip(keys_by_range(seen, sizes), into, *pieces, strict=True):
            piece_dq.copy_(_backward_range(given, own, own_grads, scoring))
        return dq, dk, dv


def _hides_keys(sizes: RangeSizes, scoring: Scoring) -> bool:
    """Say whether a window hides keys of some range."""
    return 0 < scoring.window < max(sizes.keys, default=0)


def _forward_range(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """q [G, H/G, n, D], k and v [s, G, D] -> output [G, H/G, n, D], log-sum-exp [G, H/G, n]."""
    repeat, prefix, scale = q.shape[1], k.shape[0] - q.shape[2], scoring.scale
    if not (scoring.is_causal and prefix):
        return _forward(q, _keys(k, repeat), _keys(v, repeat), 0.0, scoring.is_causal, scale=scale)
    out, lse = _forward(q, _keys(k[prefix:], repeat), _keys(v[prefix:], repeat), 0.0, True, scale=scale)
    out = out.to(lse.dtype)
    merge_into(out, lse, *_forward(q, _keys(k[:prefix], repeat), _keys(v[:prefix], repeat), 0.0, False, scale=scale))
    return out, lse


def _backward_range(
    given: Sequence[Tensor], own: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor], scoring: Scoring
) -> Tensor:
    """As `_forward_range`: return the gradient of q [G, H/G, n, D], write those of `own` keys and values, [s, G, D]
    each, to `into`; `given` are the output's gradient, q, output and log-sum-exp."""
    grad, q, out, lse = given
    (k, v), repeat = own, q.shape[1]
    prefix = k.shape[0] - q.shape[2] if scoring.is_causal else 0

    def keys_alone(keys: slice, *, is_causal: bool) -> Tensor:
        dq, *parts = _backward(
            grad, q, _keys(k[keys], repeat), _keys(v[keys], repeat), out, lse, 0.0, is_causal, scale=scoring.scale
        )
        for total, part in zip(into, parts, strict=True):
            torch.sum(part, 1, dtype=total.dtype, out=total[keys].transpose(0, 1))
        return dq

    dq = keys_alone(slice(prefix, None), is_causal=scoring.is_causal)
    return dq + keys_alone(slice(prefix), is_causal=False) if prefix else dq


def _by_group(rows: Tensor, groups: int) -> Tensor:
    """[n, H, ...] -> view [G, H/G, n, ...]."""
    return rows.unflatten(1, (groups, -1)).movedim(0, 2)


def _keys(k: Tensor, repeat: int) -> Tensor:
    """[s, G, D] -> view [G, repeat (stride 0), s, D]."""
    row, head, item = k.stride()
    # One operator, where transpose, unsqueeze and expand are three: with short documents their calls count.
    return k.as_strided((k.shape[1], repeat, k.shape[0], k.shape[2]), (head, 0, row, item))
