"""Range attention: token ranges against their documents' prefixes, the primitive under every strategy.

    keys      0 ......... p ......... p+n
    queries               [ n rows   )         row i sees keys (p+i-window, p+i]

A backend gets all ranges of a pack at once, because a kernel call a range would cost more in launches than in work.
Backward takes *any* output and log-sum-exp per row and head, so results merged from parts may be passed in. Autograd
must never run through such a merge: the gradient would be silently wrong.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from evenload.attention.range_sizes import RangeSizes


class Scoring(NamedTuple):
    """Describes how scores become probabilities.

    Args:
        scale: factor of q·k.
        window: in tokens, 0 = none. A caller with a window may pass only the keys that the first row can see.
        is_causal: False = every row sees every key (a round of ring context parallelism); without a window.
        soft_cap: scores s become soft_cap·tanh(s / soft_cap) before the softmax (Gemma 2); 0 = they stay. Only
            `reference` has one (`backends.refusal`).
        chunk: rows see keys of their own chunk of so many tokens (Llama 4); 0 = none. Callers cut ranges at the edges
            of chunks, so backends do not read it.
    """

    scale: float
    window: int = 0
    is_causal: bool = True
    soft_cap: float = 0.0
    chunk: int = 0


KeyParts = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [_, G, D] that ranges see, range after range: each pair holds those of one range or of several that
follow each other."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q [n, H, D], keys and values [S, G, D], range after range; those of keys and values in fp32 (fp64 for fp64), or in
the compute precision where a kernel has rounded them to it."""


class RangeAttention(Protocol):
    """Computes attention. Shapes: n rows and S keys of all ranges, H query heads, G key/value heads (H a multiple of
    G), D head dim.

    Attributes:
        reason: why `auto` took it and none that is faster; "" = there is none, or it was named.
    """

    name: str
    reason: str

    def forward(self, q: Tensor, seen: KeyParts, sizes: RangeSizes, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """Return output [n, H, D] and log-sum-exp [n, H] (at least fp32) of q [n, H, D]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, seen: KeyParts, out: Tensor, lse: Tensor, sizes: RangeSizes, scoring: Scoring
    ) -> Gradients:
        """Return the gradients of all ranges.

        Args:
            grad, q, out: [n, H, D]; lse: [n, H]. `out` and `lse` may be of more keys than the ranges'.
        """
        ...


def keys_by_range(seen: KeyParts, sizes: RangeSizes) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values [s, G, D] of every range, as views."""
    pieces: list[tuple[Tensor, Tensor]] = []
    for keys, values in seen:
        stop, left = len(pieces), keys.shape[0]
        while left > 0:
            left -= sizes.keys[stop]
            stop += 1
        each = sizes.keys[len(pieces) : stop]
        pieces += zip(keys.split(each), values.split(each), strict=True)
    return pieces


def first_visible_key(start: int, window: int) -> int:
    """Return the index of the first key that the query row at position `start` sees."""
    return max(0, start - window + 1) if window else 0


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add attention over other keys in place, weighted by log-sum-exps. Autograd must never run through this.

    Args:
        out: [..., D], lse: [...], of the keys so far (0 and -inf = none); both fp32 or fp64.
        part: [..., D] in any precision, part_lse: [...], of other keys, at least one.
    """
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


def work_dtype(like: Tensor) -> torch.dtype:
    """Return the precision of log-sum-exps and of gradients of keys and values: fp64 for fp64, else fp32."""
    return torch.float64 if like.dtype == torch.float64 else torch.float32
