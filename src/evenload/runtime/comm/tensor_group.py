"""`TensorGroup`: the ranks that hold parts of the same matrices; `RowExchange`: how rows of packs lie on them.

Inside attention and feed-forward blocks every rank has all rows of a pack and some columns; between blocks it has whole
rows of some tokens (sequence parallelism, Korthikanti et al. 2022).

    gather       rows of all ranks -> all rows, in pack order; one all-gather, padded to the fullest rank
    sum_scatter  all rows of every rank -> own rows, summed; one all-to-all, added here in at least fp32 and in rank
                 order: one rounding in bf16 instead of tp - 1, and the same bits whatever the transport does

Both also in chunks of a pack's rows, so that the product of one chunk runs while the next is under way.

Token p of document d belongs to rank (d + p) mod tp (`RowShard`), whatever its pack: a backward pack needs other ranges
than were recorded, and no recorded row ever moves. Price: a copy of the rows with the transfer, as rows of different
ranks alternate.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.attention.range_attention import work_dtype
from evenload.cost.group_transfers import TENSOR_CHUNKS
from evenload.runtime.comm.collectives import RankGroup, Transfer
from evenload.runtime.comm.watch import RankWatch
from evenload.runtime.device import to_device
from evenload.types.document import Range

CHUNK_ROWS = 512
"""Rows of a pack that a chunk has at least: smaller products keep no GPU busy."""


@dataclass(frozen=True)
class RowShard:
    """Which rows a rank of a tensor-parallel group has between blocks."""

    rank: int
    size: int

    def num_rows(self, ranges: Iterable[Range]) -> int:
        return sum(self.rows_before(doc_id, stop) - self.rows_before(doc_id, start) for doc_id, start, stop in ranges)

    def rows_before(self, doc_id: int, position: int) -> int:
        """Count own rows among a document's tokens `[0, position)`."""
        return (position - (self.rank - doc_id) % self.size + self.size - 1) // self.size


def row_owners(ranges: Iterable[Range], size: int) -> NDArray[np.int64]:
    """Return the rank that has each row of token ranges; int64[T]."""
    owners = [np.arange(start, stop, dtype=np.int64) + doc_id for doc_id, start, stop in ranges]
    return np.concatenate([*owners, np.zeros(0, np.int64)]) % size


def with_padding(rows: Tensor, count: int) -> Tensor:
    """Return rows [n, ...] with zeros behind them, [count, ...]; themselves where they are as many."""
    missing = count - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


class TensorGroup(RankGroup):
    """Ranks with parts of the same matrices; chunks have at least `chunk_rows` of a pack's rows, alike on all ranks."""

    chunk_rows = CHUNK_ROWS

    def __init__(self, group: dist.ProcessGroup, watch: RankWatch) -> None:
        super().__init__(group, watch)
        self.shard = RowShard(self.rank, self.size)

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], what: str) -> Transfer:
        """Start to send sent[r] rows to every rank r, and to receive received[r] of it. Both in rank order."""
        source, result = rows.contiguous(), rows.new_empty((sum(received), *rows.shape[1:]))
        exchange = partial(dist.all_to_all_single, result, source, received, sent, self.process_group, async_op=True)
        return self._start(what, source, result, exchange)

    def all_reduce(self, tensor: Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        with self.waiting(what):
            dist.all_reduce(tensor, op=op, group=self.process_group)
        return tensor


@dataclass(frozen=True, eq=False)
class RowChunk:
    """A run of a pack's T rows that is exchanged at once, and which of this rank's rows these are."""

    rows: slice
    own: slice
    exchange: "RowExchange"


class RowExchange:
    """Rows of one pack, or of a part of one, on their way between their ranks (`owners`, int64[T]) and all ranks."""

    def __init__(self, group: TensorGroup, owners: NDArray[np.int64], device: torch.device, what: str) -> None:
        self._group, self._owners, self._device, self._what = group, owners, device, what
        counts = np.bincount(owners, minlength=group.shard.size)
        order = np.concatenate([np.flatnonzero(owners == rank) for rank in range(group.shard.size)])
        first = np.cumsum(counts) - counts
        self._counts: list[int] = counts.tolist()
        self._padded = int(counts.max(initial=0))
        place = np.empty(len(owners), np.int64)
        place[order] = np.arange(len(owners)) + np.repeat(np.arange(len(counts)) * self._padded - first, counts)
        self._order, self._place = self._on_device(order), self._on_device(place)

    @property
    def num_own(self) -> int:
        return self._counts[self._group.rank]

    @property
    def num_rows(self) -> int:
        return len(self._owners)

    @cached_property
    def chunks(self) -> tuple[RowChunk, ...]:
        """The pack's rows in runs of about as many each; the same on every rank."""
        total, rank = self.num_rows, self._group.rank
        count = min(TENSOR_CHUNKS, total // self._group.chunk_rows)
        if count < 2:
            return (RowChunk(slice(0, total), slice(0, self.num_own), self),)
        edges = [total * index // count for index in range(count + 1)]
        own = np.concatenate([[0], np.cumsum(self._owners == rank)])[edges].tolist()
        chunks = []
        for (low, high), (first, last) in zip(pairwise(edges), pairwise(own), strict=True):
            exchange = RowExchange(self._group, self._owners[low:high], self._device, self._what)
            chunks.append(RowChunk(slice(low, high), slice(first, last), exchange))
        return tuple(chunks)

    def gather(self, own: Tensor) -> Tensor:
        """Gather [num_own, ...] into [T, ...] in row order. Collective, as all of these."""
        return self._group.all_gather(with_padding(own, self._padded), self._what).wait()[self._place]

    def start_gather(self, own: Tensor) -> Callable[[Tensor], None]:
        """Start a `gather`; the result waits and fills a tensor [T, ...]."""
        transfer = self._group.all_gather(with_padding(own, self._padded), self._what)
        return lambda rows: torch.index_select(transfer.wait(), 0, self._place, out=rows)  # type: ignore[return-value]

    def sum_scatter(self, partial: Tensor) -> Tensor:
        """Sum [T, ...] over ranks; return own rows [num_own, ...] in the dtype of `partial`."""
        return self.start_sum_scatter(partial)()

    def start_sum_scatter(self, partial: Tensor) -> Callable[[], Tensor]:
        """Start a `sum_scatter`; the result waits."""
        received = [self.num_own] * self._group.size
        transfer = self._group.all_to_all(partial[self._order], self._counts, received, self._what)

        def arrive() -> Tensor:
            parts = transfer.wait().view(self._group.size, self.num_own, *partial.shape[1:])
            return parts.sum(0, dtype=work_dtype(partial)).to(partial.dtype)

        return arrive

    def divide(self, chosen: NDArray[np.bool_]) -> tuple["RowExchange", Tensor, Tensor]:
        """Return an exchange of the chosen rows (bool[T]) only, and which of this rank's rows are and are not."""
        own = chosen[self._owners == self._group.rank]
        part = RowExchange(self._group, self._owners[chosen], self._device, self._what)
        return part, self._on_device(np.flatnonzero(own)), self._on_device(np.flatnonzero(~own))

    def _on_device(self, index: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(index), self._device)
