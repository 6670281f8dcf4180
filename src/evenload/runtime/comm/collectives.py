"""Collectives over one tensor for all ranks, a queue that runs them while the model computes, and the groups of ranks
that use both.

A `CollectiveQueue` runs calls in the order in which they were put: at once, on a GPU in a stream of their own, or in a
thread, because gloo's collectives block their caller. Only one group's collectives may be in a queue.

The transfers of a `RankGroup` are asynchronous and named in errors; ranks of a `ContextGroup` share documents, by
static context parallelism or DP-Merge. It is a block of replicas (first, number) with all their context ranks, on one
pipeline rank. Blocks are aligned, of the sizes of `ParallelLayout.block_sizes`; all are made once at start, and a plan
only chooses among them.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.runtime.comm.watch import Background, RankWatch
from evenload.runtime.device import step_clock
from evenload.types.document import ReplicaBlock
from evenload.types.layout import ParallelLayout

# torch 2.13 calls these what 2.11 and 2.12 call `all_gather_into_tensor` and `reduce_scatter_tensor`.
_torch: Any = dist
all_gather_single = getattr(dist, "all_gather_single", None) or _torch.all_gather_into_tensor
"""(output, input, group, async_op): inputs of all ranks, in rank order, one after the other in `output`."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor
"""(output, input, op, group, async_op): the rank's own share of the reduced `input`."""


class Span(NamedTuple):
    """Start and end of a call, as marks of the queue's clock."""

    start: Any
    end: Any


class CollectiveQueue:
    """Runs one step's calls where they are put; subclasses overlap them with compute."""

    def __init__(self, device: torch.device) -> None:
        self.clock = step_clock(device)
        self.clock.start()
        self._spans: list[Span] = []

    def put(self, call: Callable[[], object]) -> int:
        """Run a call after those before it; return its number, from 0. Does not wait for what overlaps."""
        start = self.clock.mark()
        call()
        self._spans.append(Span(start, self.clock.mark()))
        return len(self._spans) - 1

    def await_call(self, number: int) -> None:
        """Wait until a call is done, on a GPU for what is computed next; raise what it, or one before it, raised."""

    def seal(self) -> None:
        """Say that no more calls come."""

    def wait(self) -> list[Span]:
        """Wait until all calls are done, on a GPU for whatever is computed next; raise what one of them raised."""
        return self._spans

    def close(self) -> None:
        """Run no more calls; those that have not begun never will. Waits for nothing."""


# One a device: torch has a pool of 32, so a new one every step would soon be that of receives or copies to the host.
_streams: dict[torch.device, torch.cuda.Stream] = {}


class StreamQueue(CollectiveQueue):
    """Runs calls in a stream of their own. Several GPUs have never run it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._device = device
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        self._stream = _streams[device]

    def put(self, call: Callable[[], object]) -> int:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return super().put(call)

    def await_call(self, number: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._spans[number].end)

    def wait(self) -> list[Span]:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._spans


class ThreadQueue(CollectiveQueue):
    """Runs calls in a thread, which ends with the queue, or with the first call that fails."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._is_closed = False
        self._num_put = 0
        self._has_ended = threading.Condition()
        self._thread = Background(self._run, "evenload-collectives")

    def put(self, call: Callable[[], object]) -> int:
        self._calls.put(call)
        self._num_put += 1
        return self._num_put - 1

    def await_call(self, number: int) -> None:
        with self._has_ended:
            self._has_ended.wait_for(lambda: len(self._spans) > number or self._error is not None)
        if len(self._spans) <= number and self._error is not None:
            raise self._error

    def seal(self) -> None:
        self._calls.put(None)

    def wait(self) -> list[Span]:
        self.seal()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._spans

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def close(self) -> None:
        self._is_closed = True
        self.seal()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_closed:
            start = self.clock.mark()
            try:
                call()
            except BaseException as error:  # whatever it is, who waits raises it
                with self._has_ended:
                    self._error = error
                    self._has_ended.notify_all()
                return
            with self._has_ended:
                self._spans.append(Span(start, self.clock.mark()))
                self._has_ended.notify_all()


def collective_queue(device: torch.device, *, is_overlapped: bool) -> CollectiveQueue:
    """Make the queue of one step's calls on a device; not `is_overlapped` compute = they run where they are put."""
    if not is_overlapped:
        return CollectiveQueue(device)
    return StreamQueue(device) if device.type == "cuda" else ThreadQueue(device)


class TorchPeers:
    """See `evenload.data.batches.Peers`; the group is of all ranks that read together, with a CPU backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def gather(self, data: bytes) -> list[bytes]:
        everyone = [b""] * self.size
        dist.all_gather_object(everyone, data, group=self._group)
        return everyone

    def broadcast(self, data: bytes) -> bytes:
        content = [data]
        dist.broadcast_object_list(content, group=self._group, group_src=0)
        return content[0]

    def exchange(self, outgoing: Sequence[NDArray[np.int32]], incoming: Sequence[int]) -> list[NDArray[np.int32]]:
        """Send every rank its part, and receive parts of the `incoming` lengths, in one all-to-all."""
        sent = torch.from_numpy(np.concatenate(outgoing).astype(np.int32, copy=False))
        received = torch.empty(sum(incoming), dtype=torch.int32)
        dist.all_to_all_single(received, sent, list(incoming), [len(part) for part in outgoing], group=self._group)
        return [part.numpy() for part in received.split(list(incoming))]


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
        firsts = range(0, layout.dp - size + 1, size)
        for p, t, first in itertools.product(range(layout.pipeline_ranks), range(layout.tp), firsts):
            members: list[int] = grid[p, first : first + size, :, t].ravel().tolist()
            made = new_group(members)
            if rank in members:
                mine[ReplicaBlock(first, size)] = ContextGroup(made, watch)
    return mine
