"""Range attention of all slices of a pack at once, for backends that have one kernel call for it.

A pack is many short ranges; on a GPU a kernel call each would cost more in launches than in work. A backend with
`BatchedAttention` gets them in one call; the others (CPU kernels, whose calls cost nothing) one after the other, so
that callers write one thing. Gradients come back range by range: where the backend works range by range, those of one
range are dropped before the next are made.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from evenload.attention.range_attention import RangeAttention


class KeyRange(NamedTuple):
    """Query rows of a pack and what they see.

    Args:
        rows: of the pack's queries, at least one; the next range's start where these stop.
        keys, values: [s, G, D], s >= the number of rows; the last belong to the rows.
    """

    rows: slice
    keys: Tensor
    values: Tensor


RangeGradients = tuple[Tensor, Tensor, Tensor]
"""Of one range: q [n, H, D], k [s, G, D] and v [s, G, D]; those of k and v in fp32 (fp64 for fp64)."""


@runtime_checkable
class BatchedAttention(Protocol):
    """What a backend may have besides `RangeAttention`; ranges follow one another and are at least one."""

    def forward_ranges(
        self, q: Tensor, ranges: Sequence[KeyRange], *, scale: float, window: int
    ) -> tuple[Tensor, Tensor]:
        """q [T, H, D] of the pack -> output [n, H, D] and log-sum-exp [n, H] of the n rows of all ranges."""
        ...

    def backward_ranges(
        self,
        grad: Tensor,
        q: Tensor,
        ranges: Sequence[KeyRange],
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
        window: int,
    ) -> Iterator[RangeGradients]:
        """Gradients of every range, in order. All tensors are the whole pack's."""
        ...


def attend_ranges(
    backend: RangeAttention, q: Tensor, ranges: Sequence[KeyRange], *, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """q [T, H, D] of a pack -> output [n, H, D] and log-sum-exp [n, H] of the n rows of all ranges, at least one."""
    if isinstance(backend, BatchedAttention):
        return backend.forward_ranges(q, ranges, scale=scale, window=window)
    parts = [backend.forward(q[r.rows], r.keys, r.values, scale=scale, window=window) for r in ranges]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def attend_ranges_backward(
    backend: RangeAttention,
    grad: Tensor,
    q: Tensor,
    ranges: Sequence[KeyRange],
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int,
) -> Iterator[RangeGradients]:
    """Gradients of every range, in order; there may be none.

    Args:
        grad, q, out: [T, H, D] of the whole pack; lse: [T, H].
    """
    if isinstance(backend, BatchedAttention) and ranges:
        yield from backend.backward_ranges(grad, q, ranges, out, lse, scale=scale, window=window)
        return
    for r in ranges:
        yield backend.backward(
            grad[r.rows], q[r.rows], r.keys, r.values, out[r.rows], lse[r.rows], scale=scale, window=window
        )


def rows_of_all(ranges: Sequence[KeyRange]) -> slice:
    """The rows of ranges that follow one another."""
    return slice(ranges[0].rows.start, ranges[-1].rows.stop)
