"""`RankGroup`: a process group whose transfers are asynchronous and named in errors; `ContextGroup`: ranks that share
documents, by static context parallelism or DP-Merge.

A context group is a block of replicas (first, number) with all their context ranks, on one pipeline rank. Blocks are
aligned, of every size that divides the replicas; all are made once at start, and a plan only chooses among them.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.runtime.comm.collectives import all_gather_single, reduce_scatter_single
from evenload.runtime.comm.watch import RankWatch
from evenload.types.document import ReplicaBlock
from evenload.types.layout import ParallelLayout


@dataclass(frozen=True, eq=False)
class Transfer:
    """One transfer under way; `what` is for messages: "the keys and values of forward pack 3 (layer 0)"."""

    result: Tensor
    works: tuple[dist.Work, ...]
    sent: Tensor
    waiting: Callable[[str], AbstractContextManager[None]]
    what: str

    def wait(self) -> Tensor:
        with self.waiting(self.what):
            for work in self.works:
                work.wait()
        return self.result


class RankGroup:
    """This rank's view of a group. `moved_bytes` counts what this rank received, padding included."""

    def __init__(self, group: dist.ProcessGroup, watch: RankWatch) -> None:
        self.process_group, self._watch = group, watch
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self.moved_bytes = 0
        others = [str(rank) for index, rank in enumerate(self.ranks) if index != self.rank]
        self._others = f"rank{'s' if len(others) > 1 else ''} {', '.join(others)}"

    def all_gather(self, rows: Tensor, what: str) -> Transfer:
        """Start to gather [n, ...] of every rank into [size · n, ...], in rank order."""
        result = rows.new_empty((self.size * rows.shape[0], *rows.shape[1:]))
        return self._start_collective(what, rows, result, all_gather_single, (self.size - 1) * rows.nbytes)

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Surround a wait for the others; `RankLostError` where one of them died or is stuck."""
        return self._watch.waiting(what, self._others)

    def _start_collective(
        self, what: str, rows: Tensor, result: Tensor, collective: Callable[..., object], num_bytes: int
    ) -> Transfer:
        self.moved_bytes += num_bytes
        sent, group = rows.contiguous(), self.process_group
        return self._start(what, sent, result, lambda: collective(result, sent, group=group, async_op=True))

    def _start(self, what: str, sent: Tensor, result: Tensor, start: Callable[[], object]) -> Transfer:
        with self.waiting(f"a connection for {what}"):
            started = start()
        works = tuple(started) if isinstance(started, list) else (started,)
        return Transfer(result, works, sent, self.waiting, what)  # type: ignore[arg-type]


class ContextGroup(RankGroup):
    """Ranks that may share documents."""

    def reduce_scatter(self, rows: Tensor, what: str) -> Transfer:
        """Start to sum [size · n, ...] over ranks into this rank's n rows."""
        result = rows.new_empty((rows.shape[0] // self.size, *rows.shape[1:]))
        return self._start_collective(what, rows, result, reduce_scatter_single, (self.size - 1) * result.nbytes)

    def pass_on(self, rows: Tensor, what: str) -> Transfer:
        """Start to send to the next rank of the ring, and receive as much from the one before. Leave `rows` alone until
        then."""
        result = torch.empty_like(rows)
        self.moved_bytes += result.nbytes
        to, source = self.ranks[(self.rank + 1) % self.size], self.ranks[self.rank - 1]
        send = dist.P2POp(dist.isend, rows, to, self.process_group)
        receive = dist.P2POp(dist.irecv, result, source, self.process_group)
        return self._start(what, rows, result, lambda: dist.batch_isend_irecv([send, receive]))


def rank_grid(layout: ParallelLayout) -> NDArray[np.int64]:
    """Return global ranks by place: [pipeline rank, dp, cp, tp], in the order of `ParallelLayout.global_rank`."""
    return np.arange(layout.world_size).reshape(layout.pipeline_ranks, layout.dp, layout.cp, layout.tp)


def create_context_groups(
    layout: ParallelLayout, rank: int, new_group: Callable[[list[int]], dist.ProcessGroup], watch: RankWatch
) -> dict[ReplicaBlock, ContextGroup]:
    """Make every context group of the layout; return those of `rank` by block. Collective over all ranks."""
    grid, mine = rank_grid(layout), {}
    for size in (1, *layout.block_sizes):
        if size * layout.cp == 1:
            continue
        for p, t, first in itertools.product(range(layout.pipeline_ranks), range(layout.tp), range(0, layout.dp, size)):
            members: list[int] = grid[p, first : first + size, :, t].ravel().tolist()
            made = new_group(members)
            if rank in members:
                mine[ReplicaBlock(first, size)] = ContextGroup(made, watch)
    return mine
