"""Plain matrix-product attention for any dtype and device: what other backends are tested against, and what runs models
that cap attention scores (Gemma 2). Rows go in blocks, each against the keys that any of its rows sees."""

from collections.abc import Iterator

import torch
from torch import Tensor

from evenload.attention.range_attention import (
    Gradients,
    KeyParts,
    RangeSizes,
    Scoring,
    first_visible_key,
    keys_by_range,
    work_dtype,
)

_BLOCK_ROWS = 256


class ReferenceAttention:
    """Softmax written out, in fp32 (fp64 for fp64 inputs)."""

    name = "reference"

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def forward(self, q: Tensor, seen: KeyParts, sizes: RangeSizes, scoring: Scoring) -> tuple[Tensor, Tensor]:
        each = zip(q.split(sizes.rows), keys_by_range(seen, sizes), strict=True)
        outs, lses = zip(*(self._forward(rows, *own, scoring) for rows, own in each), strict=True)
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self, grad: Tensor, q: Tensor, seen: KeyParts, out: Tensor, lse: Tensor, sizes: RangeSizes, scoring: Scoring
    ) -> Gradients:
        given = (tensor.split(sizes.rows) for tensor in (grad, q, out, lse))
        each = zip(*given, keys_by_range(seen, sizes), strict=True)
        parts = [self._backward(*rows, *own, scoring) for *rows, own in each]  # type: ignore[bad-argument-count]
        dq, dk, dv = (torch.cat(of_ranges) for of_ranges in zip(*parts, strict=True))
        return dq, dk, dv

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        keys, values = self._per_query_head(k, q), self._per_query_head(v, q)
        outs, lses = [], []
        for _, seen, scores in self._scores(q, keys, scoring):
            lse = torch.logsumexp(scores, dim=-1)  # [H, n]
            outs.append(torch.einsum("hts,shd->thd", (scores - lse[..., None]).exp(), values[seen]))
            lses.append(lse.transpose(0, 1))
        return torch.cat(outs).to(q.dtype), torch.cat(lses).contiguous()

    def _backward(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, scoring: Scoring
    ) -> Gradients:
        keys, values = self._per_query_head(k, q), self._per_query_head(v, q)
        work = keys.dtype
        dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
        for rows, seen, scores in self._scores(q, keys, scoring):
            block_grad, block_out = grad[rows].to(work), out[rows].to(work)
            p = (scores - lse[rows].transpose(0, 1)[..., None]).exp()  # [H, n, s]
            dv[seen] += torch.einsum("hts,thd->shd", p, block_grad)
            dp = torch.einsum("thd,shd->hts", block_grad, values[seen])
            ds = p * (dp - (block_grad * block_out).sum(-1).transpose(0, 1)[..., None]) * scoring.scale
            if scoring.soft_cap:
                # d tanh; a hidden score is -inf and has no probability, so its factor may be anything finite.
                ds = ds * (1 - (scores.masked_fill(scores.isinf(), 0.0) / scoring.soft_cap).square())
            dqs.append(torch.einsum("hts,shd->thd", ds, keys[seen]))
            dk[seen] += torch.einsum("hts,thd->shd", ds, q[rows].to(work))
        count, groups = k.shape[0], k.shape[1]
        dk, dv = (t.reshape(count, groups, -1, t.shape[-1]).sum(2) for t in (dk, dv))
        return torch.cat(dqs).to(q.dtype), dk, dv

    @staticmethod
    def _per_query_head(k: Tensor, q: Tensor) -> Tensor:
        return k.to(work_dtype(q)).repeat_interleave(q.shape[1] // k.shape[1], dim=1)

    def _scores(self, q: Tensor, keys: Tensor, scoring: Scoring) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield blocks of rows, the keys that any of them sees, and their scores [H, rows, keys], -inf where a row does
        not see a key."""
        num_rows, num_keys = q.shape[0], keys.shape[0]
        prefix = num_keys - num_rows
        for start in range(0, num_rows, _BLOCK_ROWS):
            rows, seen = slice(start, min(start + _BLOCK_ROWS, num_rows)), slice(0, num_keys)
            if scoring.is_causal:
                seen = slice(first_visible_key(prefix + start, scoring.window), prefix + rows.stop)
            scores = torch.einsum("thd,shd->hts", q[rows].to(keys.dtype), keys[seen]) * scoring.scale
            if scoring.soft_cap:
                scores = torch.tanh(scores / scoring.soft_cap) * scoring.soft_cap
            if scoring.is_causal:
                row = torch.arange(start, rows.stop, device=q.device)[:, None] + prefix
                column = torch.arange(seen.start, seen.stop, device=q.device)[None]
                visible = column <= row
                if scoring.window:
                    visible &= column > row - scoring.window
                scores = scores.masked_fill(~visible, float("-inf"))
            yield rows, seen, scores
