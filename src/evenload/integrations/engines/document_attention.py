"""`document_attention`: causal attention of each document of a pack to itself, for models of other libraries.

Evenload's backends under autograd: on GPUs the flash-attention kernels that torch brings, on the CPU its flash kernel.
Megatron-Core's layers (`megatron_attention`) and transformers' models (`ulysses`) call it where their own attention
takes no packed documents.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenload.attention.backends import select_backend
from evenload.attention.range_attention import KeyRange, RangeAttention, Scoring


def document_attention(q: Tensor, k: Tensor, v: Tensor, edges: Sequence[int], scale: float) -> Tensor:
    """Attention of one pack, with gradients.

    Args:
        q: [T, H, D]; k, v: [T, G, D], H a multiple of G.
        edges: where documents begin, on the host: 0, ..., T.
        scale: factor of q·k.

    Returns:
        [T, H, D].
    """
    backend = select_backend("auto", q.device.type, dtype=q.dtype, head_dim=q.shape[-1])
    return _DocumentAttention.apply(q, k, v, tuple(edges), backend, Scoring(scale))  # type: ignore[bad-return]


class _DocumentAttention(torch.autograd.Function):
    """A backend's forward and backward over all documents of a pack."""

    @staticmethod
    def forward(  # type: ignore[bad-override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, edges: tuple[int, ...], backend: RangeAttention, scoring: Scoring
    ) -> Tensor:
        out, lse = backend.forward(q, _documents(k, v, edges), scoring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = edges, backend, scoring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[bad-override]
        q, k, v, out, lse = ctx.saved_tensors
        edges, backend, scoring = ctx.settings
        made = backend.backward(grad.contiguous(), q, _documents(k, v, edges), out, lse, scoring)
        dq, dk, dv = (torch.cat(parts) for parts in zip(*made, strict=True))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _documents(k: Tensor, v: Tensor, edges: tuple[int, ...]) -> list[KeyRange]:
    return [
        KeyRange(slice(start, stop), k[start:stop], v[start:stop])
        for start, stop in itertools.pairwise(edges)
        if stop > start
    ]
