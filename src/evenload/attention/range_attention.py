"""Range attention: token ranges against their documents' prefixes, the primitive under every strategy.

    keys      0 ......... p ......... p+n
    queries               [ n rows   )         row i sees keys (p+i-window, p+i]

A backend gets all ranges of a pack at once, because a kernel call a range would cost more in launches than in work.
Backward takes *any* output and log-sum-exp per row and head, so results merged from parts may be passed in. Autograd
must never run through such a merge: the gradient would be silently wrong.

What is made once a pack, for all layers and their attention, are sizes, offsets and calls of a kernel (`RangeSizes`).
FlashAttention 2 starts ceil(longest / 128) blocks for every document and head, forward over queries, backward over keys
and twice over queries, and so does FlashAttention 3 backward: beside one long document most blocks of short ones are
empty. An empty block of 32 heads costs about 64 ns forward and 176 ns backward on an H100 (estimated: 132 processors,
which start a block in some 0.3 and 0.7 µs), so long and short neighbours go in calls of their own where that pays for a
copy of what all calls return, about `COPY_BLOCKS` empty blocks for every block that works, and for the calls' launches.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

BLOCK_ROWS = 128
COPY_BLOCKS = 6
CALL_BLOCKS = 256


class KernelCall(NamedTuple):
    """Describes a call: its ranges' rows and keys among all; cu_q, cu_k: int32[ranges + 1] on the device; max_q, max_k:
    upper bounds of single ranges."""

    rows: slice
    keys: slice
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class RangeSizes:
    """Holds the query rows (at least one) and the keys of every range. Under a causal mask a range has at least as many
    keys as rows, and the last ones belong to the rows."""

    def __init__(self, rows: Sequence[int], keys: Sequence[int]) -> None:
        self.rows, self.keys = list(rows), list(keys)
        self.num_keys = sum(self.keys)
        self._calls: list[KernelCall] = []

    def calls(self, device: torch.device) -> list[KernelCall]:
        """Return the calls of a packed-sequence kernel on the device of the pack."""
        if self._calls:
            return self._calls
        counts = call_sizes([-(-max(sizes) // BLOCK_ROWS) for sizes in zip(self.rows, self.keys, strict=True)])
        groups = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        ends = np.zeros((2, len(self.rows) + 1), np.int32)
        np.cumsum([self.rows, self.keys], axis=1, out=ends[:, 1:])
        # All offsets go to the device at once, from pinned memory, so the host does not wait.
        offsets = torch.from_numpy(np.concatenate([ends[:, a : b + 1] - ends[:, a, None] for a, b in groups], axis=1))
        if device.type == "cuda":
            offsets = offsets.pin_memory().to(device, non_blocking=True)
        for (a, b), (cu_q, cu_k) in zip(groups, offsets.split([n + 1 for n in counts], dim=1), strict=True):
            rows, keys = (slice(*side[[a, b]].tolist()) for side in ends)
            # With one query a sequence FlashAttention 2 lays heads out in another way (its decoding path), which is
            # wrong where only the longest of several has one; a larger bound keeps it away.
            self._calls.append(KernelCall(rows, keys, cu_q, cu_k, max(2, *self.rows[a:b]), max(self.keys[a:b])))
        return self._calls


def call_sizes(blocks: Sequence[int]) -> list[int]:
    """Return how many neighbouring ranges, of so many blocks each, go in every call: all in one, or runs of long and of
    short ones, about the power of two that starts the fewest blocks, and again runs of these."""
    if len(blocks) * max(blocks) <= (1 + COPY_BLOCKS) * sum(blocks) + CALL_BLOCKS:
        return [len(blocks)]
    return _divided(blocks)


def _divided(blocks: Sequence[int]) -> list[int]:
    limits = [1 << bits for bits in range(max(blocks).bit_length(), -1, -1)]
    divided = ([list(run) for _, run in itertools.groupby(blocks, lambda n, most=most: n > most)] for most in limits)
    best = min(divided, key=lambda runs: sum(len(run) * max(run) + CALL_BLOCKS for run in runs))
    return [len(blocks)] if len(best) == 1 else [size for run in best for size in _divided(run)]


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
