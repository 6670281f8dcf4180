"""Range attention on the CPU's flash kernel.

The aten kernel is aligned top-left: its causal mask is right only for as many queries as keys. So a
slice with a prefix is two calls, prefix (no mask) and square (causal), merged through their
log-sum-exps; backward is two calls that both get the *merged* output and log-sum-exp. With a sliding
window the queries go in blocks, each against its band of keys under an additive mask.

GQA needs no copy of K and V: query heads are viewed as [G, H/G, n, D] and K/V expanded with stride 0.
Measured (notes in docs/architecture.md): 1.05-1.15 x the time of one full causal call for 5-8 slices.
"""

import torch
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Query rows of one banded call: large enough that the kernel dominates its call overhead, small
# against common windows (512-4096) so that little of the band is masked away.
_BAND_ROWS = 256


class CpuFlashAttention:
    """fp64, fp32 and bf16."""

    name = "cpu_flash"
    soft_cap = 0.0  # the kernel has none

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> tuple[Tensor, Tensor]:
        """See `RangeAttention.forward`."""
        n, heads, groups, prefix = q.shape[0], q.shape[1], k.shape[1], k.shape[0] - q.shape[0]
        kernel_q = _queries(q, groups)
        if window and window < k.shape[0]:
            parts = [
                _forward(kernel_q[:, :, rows], _keys(k[keys], heads), _keys(v[keys], heads), 0.0, False,
                         attn_mask=mask, scale=scale)
                for rows, keys, mask in _bands(q, prefix, window)
            ]  # fmt: skip
            out, lse = torch.cat([o for o, _ in parts], dim=2), torch.cat([s for _, s in parts], dim=2)
            return _rows(out), _lse_rows(lse, n)
        out, lse = _forward(kernel_q, _keys(k[prefix:], heads), _keys(v[prefix:], heads), 0.0, True, scale=scale)
        if prefix:
            before, lse_before = _forward(
                kernel_q, _keys(k[:prefix], heads), _keys(v[:prefix], heads), 0.0, False, scale=scale
            )
            out, lse = _merge(out, lse, before, lse_before)
        return _rows(out), _lse_rows(lse, n)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RangeAttention.backward`."""
        n, heads, groups, prefix = q.shape[0], q.shape[1], k.shape[1], k.shape[0] - q.shape[0]
        kernel_q, kernel_out, kernel_grad = (_queries(t, groups) for t in (q, out, grad))
        kernel_lse = lse.view(n, groups, heads // groups).permute(1, 2, 0)
        if window and window < k.shape[0]:
            dq_parts = []
            dk, dv = (torch.zeros(k.shape, dtype=lse.dtype) for _ in range(2))
            for rows, keys, mask in _bands(q, prefix, window):
                part_q, part_k, part_v = _backward(
                    kernel_grad[:, :, rows], kernel_q[:, :, rows], _keys(k[keys], heads), _keys(v[keys], heads),
                    kernel_out[:, :, rows], kernel_lse[:, :, rows], 0.0, False, attn_mask=mask, scale=scale,
                )  # fmt: skip
                dq_parts.append(part_q)
                dk[keys] += _sum_over_query_heads(part_k)
                dv[keys] += _sum_over_query_heads(part_v)
            return _rows(torch.cat(dq_parts, dim=2)), dk, dv
        dq, dk, dv = _backward(
            kernel_grad, kernel_q, _keys(k[prefix:], heads), _keys(v[prefix:], heads), kernel_out, kernel_lse, 0.0,
            True, scale=scale,
        )  # fmt: skip
        dk, dv = _sum_over_query_heads(dk), _sum_over_query_heads(dv)
        if prefix:
            dq_before, dk_before, dv_before = _backward(
                kernel_grad, kernel_q, _keys(k[:prefix], heads), _keys(v[:prefix], heads), kernel_out, kernel_lse, 0.0,
                False, scale=scale,
            )  # fmt: skip
            dq = dq + dq_before
            dk = torch.cat([_sum_over_query_heads(dk_before), dk])
            dv = torch.cat([_sum_over_query_heads(dv_before), dv])
        return _rows(dq), dk, dv

    def forward_full(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """See `FullAttention.forward_full`."""
        groups, heads = k.shape[1], q.shape[1]
        out, lse = _forward(_queries(q, groups), _keys(k, heads), _keys(v, heads), 0.0, False, scale=scale)
        return _rows(out), _lse_rows(lse, q.shape[0])

    def backward_full(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `FullAttention.backward_full`."""
        n, heads, groups = q.shape[0], q.shape[1], k.shape[1]
        kernel_q, kernel_out, kernel_grad = (_queries(t, groups) for t in (q, out, grad))
        kernel_lse = lse.view(n, groups, heads // groups).permute(1, 2, 0)
        dq, dk, dv = _backward(
            kernel_grad, kernel_q, _keys(k, heads), _keys(v, heads), kernel_out, kernel_lse, 0.0, False, scale=scale
        )
        return _rows(dq), _sum_over_query_heads(dk), _sum_over_query_heads(dv)


def _queries(q: Tensor, groups: int) -> Tensor:
    """[n, H, D] -> view [G, H/G, n, D]."""
    return q.view(q.shape[0], groups, q.shape[1] // groups, q.shape[2]).permute(1, 2, 0, 3)


def _keys(k: Tensor, heads: int) -> Tensor:
    """[s, G, D] -> view [G, H/G (stride 0), s, D]."""
    return k.transpose(0, 1).unsqueeze(1).expand(-1, heads // k.shape[1], -1, -1)


def _rows(out: Tensor) -> Tensor:
    """[G, H/G, n, D] -> [n, H, D]."""
    groups, repeat, n, dim = out.shape
    return out.permute(2, 0, 1, 3).reshape(n, groups * repeat, dim)


def _lse_rows(lse: Tensor, n: int) -> Tensor:
    """[G, H/G, n] -> [n, H]."""
    return lse.permute(2, 0, 1).reshape(n, -1)


def _sum_over_query_heads(dk: Tensor) -> Tensor:
    """[G, H/G, s, D] -> [s, G, D], summed in at least fp32."""
    work = torch.float32 if dk.dtype == torch.bfloat16 else dk.dtype
    return dk.sum(1, dtype=work).transpose(0, 1)


def _merge(out: Tensor, lse: Tensor, other: Tensor, lse_other: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two key sets; weights in the log-sum-exp's precision."""
    both = torch.logaddexp(lse, lse_other)
    merged = out * (lse - both).exp().unsqueeze(-1) + other * (lse_other - both).exp().unsqueeze(-1)
    return merged.to(out.dtype), both


def _bands(q: Tensor, prefix: int, window: int) -> list[tuple[slice, slice, Tensor]]:
    """Query blocks, the keys each can see, and the additive mask between them."""
    bands = []
    for start in range(0, q.shape[0], _BAND_ROWS):
        stop = min(start + _BAND_ROWS, q.shape[0])
        first, last = max(0, prefix + start - window + 1), prefix + stop
        row = torch.arange(prefix + start, last)[:, None]
        column = torch.arange(first, last)[None]
        hidden = (column > row) | (column <= row - window)
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        bands.append((slice(start, stop), slice(first, last), mask))
    return bands
