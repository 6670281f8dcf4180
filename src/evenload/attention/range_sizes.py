"""What is made once a pack of its ranges, for all layers and their attention: sizes, offsets, calls of a kernel.

FlashAttention 2 starts ceil(longest / 128) blocks for every document and head, forward over queries, backward over keys
and twice over queries, and so does FlashAttention 3 backward: beside one long document most blocks of short ones are
empty. An empty block of 32 heads costs about 64 ns forward and 176 ns backward on an H100 (estimated: 132 processors,
which start a block in some 0.3 and 0.7 µs), so long and short neighbours go in calls of their own where that pays for a
copy of what all calls return, about `COPY_BLOCKS` empty blocks for every block that works, and for the calls' launches.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

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
