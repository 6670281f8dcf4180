"""`TensorGroup`: the ranks that hold parts of the same matrices, and how rows of packs lie on them.

Inside attention and feed-forward blocks every rank has all rows of a pack and some columns; between blocks it has
whole rows of some tokens (sequence parallelism, Korthikanti et al. 2022), those of `row_shard`.

    gather       rows of all ranks -> all rows, in pack order; one all-gather, padded to the fullest rank
    sum_scatter  all rows of every rank -> own rows, summed; one all-to-all, summed here in at least fp32 and in rank
                 order: the bytes of a reduce-scatter, but one rounding in bf16 instead of tp - 1, no padding, and the
                 same bits whatever the transport does

Shapes come from the plan, so nothing is negotiated and no rank waits for its device. Price: a copy of the rows beside
the transfer, as rows of different ranks stand by turns.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.attention.range_attention import work_dtype
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.row_shard import RowShard, row_owners
from evenload.runtime.comm.watch import RankWatch
from evenload.runtime.device import to_device
from evenload.types.token_range import Range


class TensorGroup:
    """This rank's view of its group."""

    def __init__(self, group: dist.ProcessGroup, watch: RankWatch) -> None:
        self.process_group = self._group = group
        self._watch = watch
        self.shard = RowShard(dist.get_rank(group), dist.get_world_size(group))
        ranks = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        self._others = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

    def all_gather(self, rows: Tensor, what: str) -> Tensor:
        """[n, ...] of every rank -> [size · n, ...], in rank order."""
        gathered, rows = rows.new_empty((self.shard.size * rows.shape[0], *rows.shape[1:])), rows.contiguous()
        with self.waiting(what):
            all_gather_single(gathered, rows, group=self._group)
        return gathered

    def all_to_all(self, rows: Tensor, counts: list[int], what: str) -> Tensor:
        """counts[r] rows for every rank r, in rank order -> [size · counts[own], ...] from all ranks, in rank order."""
        own = counts[self.shard.rank]
        received, rows = rows.new_empty((self.shard.size * own, *rows.shape[1:])), rows.contiguous()
        sizes = [own] * self.shard.size
        with self.waiting(what):
            dist.all_to_all_single(received, rows, sizes, counts, group=self._group)
        return received

    def all_reduce(self, tensor: Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        with self.waiting(what):
            dist.all_reduce(tensor, op=op, group=self._group)
        return tensor

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a transfer; `RankLostError` where another rank of the group died or is stuck."""
        return self._watch.waiting(what, self._others)


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
        return self._counts[self._group.shard.rank]

    def gather(self, own: Tensor) -> Tensor:
        """[num_own, ...] -> [T, ...] in row order. Collective, as all of these."""
        return self._group.all_gather(self._pad(own), self._what)[self._place]

    def sum_scatter(self, partial: Tensor) -> Tensor:
        """[T, ...] of every rank -> [num_own, ...], the sum over ranks of own rows, in the dtype of `partial`."""
        parts = self._group.all_to_all(partial[self._order], self._counts, self._what)
        parts = parts.view(self._group.shard.size, self.num_own, *partial.shape[1:])
        return parts.sum(0, dtype=work_dtype(partial)).to(partial.dtype)

    def divide(self, chosen: NDArray[np.bool_]) -> tuple["RowExchange", Tensor, Tensor]:
        """An exchange of the chosen rows (bool[T]) only; which of this rank's rows they are, and which the others."""
        own = chosen[self._owners == self._group.shard.rank]
        part = RowExchange(self._group, self._owners[chosen], self._device, self._what)
        return part, self._on_device(np.flatnonzero(own)), self._on_device(np.flatnonzero(~own))

    def _pad(self, own: Tensor) -> Tensor:
        missing = self._padded - self.num_own
        return torch.cat([own, own.new_zeros((missing, *own.shape[1:]))]) if missing else own

    def _on_device(self, index: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(index), self._device)


def exchange_ranges(group: TensorGroup, ranges: Iterable[Range], device: torch.device, what: str) -> RowExchange:
    return RowExchange(group, row_owners(ranges, group.shard.size), device, what)
