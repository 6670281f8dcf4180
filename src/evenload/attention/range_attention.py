"""Range attention: token ranges against their documents' prefixes, the primitive under every strategy.

    keys      0 ......... p ......... p+n
    queries               [ n rows   )         row i sees keys (p+i-window, p+i]

A backend gets all ranges of a pack at once, because a kernel call a range would cost more in launches than in work.
Backward takes *any* output and log-sum-exp per row and head, so results merged from parts may be passed in. Autograd
must never run through such a merge: the gradient would be silently wrong.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class KeyRange(NamedTuple):
    """Holds query rows of a pack (at least one; ranges follow each other) and keys and values [s, G, D] that they see:
    under a causal mask s is at least the number of rows, and the last keys belong to the rows."""

    rows: slice
    keys: Tensor
    values: Tensor


class Scoring(NamedTuple):
    """Describes how scores become probabilities.

    Args:
        scale: factor of q·k.
        window: in tokens, 0 = none. A caller with a window may pass only the keys that the first row can see.
        is_causal: False = every row sees every key (a round of ring context parallelism); without a window.
    """

    scale: float
    window: int = 0
    is_causal: bool = True


RangeGradients = tuple[Tensor, Tensor, Tensor]
"""Of one range: q [n, H, D], k [s, G, D] and v [s, G, D]; those of k and v in fp32 (fp64 for fp64), or in the compute
precision where a kernel has rounded them to it."""


@dataclass(frozen=True, eq=False)
class PackedGradients:
    """Holds gradients of all ranges of one call: q [n, H, D], keys and values [S, G, D], range after range."""

    ranges: Sequence[KeyRange]
    q: Tensor
    keys: Tensor
    values: Tensor

    def __iter__(self) -> Iterator[RangeGradients]:
        num_rows, num_keys = range_sizes(self.ranges)
        return zip(self.q.split(num_rows), self.keys.split(num_keys), self.values.split(num_keys), strict=True)


class RangeAttention(Protocol):
    """Computes attention. Shapes: H query heads, G key/value heads (H a multiple of G), D head dim.

    Attributes:
        soft_cap: scores s become soft_cap·tanh(s / soft_cap) before the softmax (Gemma 2); 0 = they stay.
    """

    name: str
    soft_cap: float

    def forward(self, q: Tensor, ranges: Sequence[KeyRange], scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Return output [n, H, D] and log-sum-exp [n, H] (at least fp32) of the n rows of all ranges of q [T, H, D]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, ranges: Sequence[KeyRange], out: Tensor, lse: Tensor, scoring: Scoring
    ) -> Iterable[RangeGradients]:
        """Return the gradients of every range, in order; there may be none. `PackedGradients` where one call made them.

        Args:
            grad, q, out: [T, H, D] of the pack; lse: [T, H]. `out` and `lse` may be of more keys than the ranges'.
        """
        ...


def first_visible_key(start: int, window: int) -> int:
    """Return the index of the first key that the query row at position `start` sees."""
    return max(0, start - window + 1) if window else 0


def range_sizes(ranges: Sequence[KeyRange]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(r.rows.stop - r.rows.start for r in ranges), tuple(r.keys.shape[0] for r in ranges)


def rows_of_all(ranges: Sequence[KeyRange]) -> slice:
    return slice(ranges[0].rows.start, ranges[-1].rows.stop)


def work_dtype(like: Tensor) -> torch.dtype:
    """Return the precision of log-sum-exps and of gradients of keys and values: fp64 for fp64, else fp32."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
