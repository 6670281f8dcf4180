"""Plain matrix-product attention: any dtype and device, O(n·s) memory. The oracle of the other backends."""

import torch
from torch import Tensor


class ReferenceAttention:
    """Softmax written out, in fp32 (fp64 for fp64 inputs)."""

    name = "reference"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int) -> tuple[Tensor, Tensor]:
        """See `RangeAttention.forward`."""
        return self._forward(q, v, self._scores(q, k, scale, window))

    def forward_full(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """See `FullAttention.forward_full`."""
        return self._forward(q, v, self._all_scores(q, k, scale))

    def _forward(self, q: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        values = self._per_query_head(v, q)
        lse = torch.logsumexp(scores, dim=-1)  # [H, n]
        out = torch.einsum("hts,shd->thd", (scores - lse[..., None]).exp(), values)
        return out.to(q.dtype), lse.transpose(0, 1).contiguous()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RangeAttention.backward`."""
        return self._backward(grad, q, k, v, out, lse, self._scores(q, k, scale, window), scale)

    def backward_full(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `FullAttention.backward_full`."""
        return self._backward(grad, q, k, v, out, lse, self._all_scores(q, k, scale), scale)

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        work = lse.dtype
        p = (scores - lse.transpose(0, 1)[..., None]).exp()  # [H, n, s]
        grad, out = grad.to(work), out.to(work)
        dv = torch.einsum("hts,thd->shd", p, grad)
        dp = torch.einsum("thd,shd->hts", grad, self._per_query_head(v, q))
        ds = p * (dp - (grad * out).sum(-1).transpose(0, 1)[..., None]) * scale
        dq = torch.einsum("hts,shd->thd", ds, self._per_query_head(k, q))
        dk = torch.einsum("hts,thd->shd", ds, q.to(work))
        keys, groups = k.shape[0], k.shape[1]
        dk, dv = (t.reshape(keys, groups, -1, t.shape[-1]).sum(2) for t in (dk, dv))
        return dq.to(q.dtype), dk, dv

    @staticmethod
    def _per_query_head(k: Tensor, q: Tensor) -> Tensor:
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        return k.to(work).repeat_interleave(q.shape[1] // k.shape[1], dim=1)

    def _all_scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        keys = self._per_query_head(k, q)
        return torch.einsum("thd,shd->hts", q.to(keys.dtype), keys) * scale

    def _scores(self, q: Tensor, k: Tensor, scale: float, window: int) -> Tensor:
        scores = self._all_scores(q, k, scale)
        row = torch.arange(q.shape[0], device=q.device)[:, None] + (k.shape[0] - q.shape[0])
        column = torch.arange(k.shape[0], device=q.device)[None]
        visible = column <= row
        if window:
            visible &= column > row - window
        return scores.masked_fill(~visible, float("-inf"))
