"""What is made once a pack of its ranges, for all layers and their attention: sizes, offsets, calls of a kernel.

FlashAttention 2 starts ceil(longest / 128) blocks for every document and head, forward over queries, backward over keys
and twice over queries, and so does FlashAttention 3 backward: beside one long document most blocks of short ones are
empty. An empty block of 32 heads costs about 64 ns forward and 176 ns backward on an H100 (estimated: 132 processors,
which start a block in some 0.3 and 0.7 µs), so neighbouring ranges go in calls of their own where that pays for a copy
of what all calls return, about `COPY_BLOCKS` empty blocks for every block that works, and for the calls' launches.
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

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_q, self.cu_k, self.max_q, self.max_k


class RangeSizes:
    """Holds the query rows (at least one) and the keys of every range. Under a causal mask a range has at least as many
    keys as rows, and the last ones belong to the rows."""

    def __init__(self, rows: Sequence[int], keys: Sequence[int]) -> None:
        self.rows, self.keys = list(rows), list(keys)
        self.num_keys = sum(self.keys)
        self._calls: tuple[KernelCall, ...] = ()

    def calls(self, device: torch.device) -> tuple[KernelCall, ...]:
        """Return the calls of a packed-sequence kernel on the device of the pack."""
        if not self._calls:
            self._calls = self._laid_out(device)
        return self._calls

    def _laid_out(self, device: torch.device) -> tuple[KernelCall, ...]:
        # All offsets go to the device at once, from pinned memory, so the host does not wait.
        longest = map(max, self.rows, self.keys)
        stops = np.cumsum(call_sizes([-(-size // BLOCK_ROWS) for size in longest])).tolist()
        groups = [slice(*edges) for edges in itertools.pairwise([0, *stops])]
        ends = np.zeros((2, len(self.rows) + 1), np.int32)
        np.cumsum([self.rows, self.keys], axis=1, out=ends[:, 1:])
        offsets = [side[one.start : one.stop + 1] - side[one.start] for one in groups for side in ends]
        on_device = torch.from_numpy(np.concatenate(offsets))
        if device.type == "cuda":
            on_device = on_device.pin_memory().to(device, non_blocking=True)
        pieces = iter(on_device.split([len(one) for one in offsets]))
        calls = []
        for one in groups:
            rows, keys = (slice(*side[[one.start, one.stop]].tolist()) for side in ends)
            # With one query a sequence FlashAttention 2 lays heads out in another way (its decoding path), which is
            # wrong where only the longest of several has one; a larger bound keeps it away.
            max_q, max_k = max(2, *self.rows[one]), max(self.keys[one])
            calls.append(KernelCall(rows, keys, next(pieces), next(pieces), max_q, max_k))
        return tuple(calls)


def call_sizes(blocks: Sequence[int]) -> list[int]:
    """Return how many neighbouring ranges, of so many blocks each, go in every call."""
    if _started(blocks) <= (1 + COPY_BLOCKS) * sum(blocks) + CALL_BLOCKS:
        return [len(blocks)]
    return _divided(blocks)


def _started(blocks: Sequence[int]) -> int:
    return len(blocks) * max(blocks)


def _divided(blocks: Sequence[int]) -> list[int]:
    best, best_cost = [list(blocks)], _started(blocks)
    for bits in range((max(blocks) - 1).bit_length()):
        runs = [list(run) for _, run in itertools.groupby(blocks, lambda size, most=1 << bits: size > most)]
        cost = sum(map(_started, runs)) + CALL_BLOCKS * (len(runs) - 1)
        if cost < best_cost:
            best, best_cost = runs, cost
    if len(best) == 1:
        return [len(blocks)]
    return [size for run in best for size in _divided(run)]
