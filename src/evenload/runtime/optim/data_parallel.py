"""Overlap data parallelism with compute: reduce-scatter gradients into shards, all-gather updated weights.

`GradientReduction`: losses are already divided by the label count of the global batch, so gradients are summed, never
averaged. A unit's reduce-scatter is queued as soon as the last pack has added to its gradients: the head's first, the
embedding's last, in one order on all ranks that hold them. No action waits for one, so there is no circle of waits as
long as no replica waits for another inside a pack (docs/decisions/03); steps whose packs replicas share reduce after
the last action. Results are equal to the bit either way. Tied weights of both ends of a pipeline, and gradients of
norms in a tensor-parallel group, are never overlapped.

`WeightGathers`: an update runs from the embedding to the head, as the next forward reads them, and queues each unit's
gather at once; a forward waits for its own unit alone, other readers of whole weights call `finish` first. All gathers
are finished before the next step's first backward, so they come before its first reduce-scatter.

`UpdatesInBackward` (`optimizer.in_backward`) sums, updates and gathers a unit while the backward waits, in the same
order on all ranks, so there is no circle of waits either; only in layouts of replicas, with one backward pack each.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.runtime.comm.collectives import Span, all_gather_single, collective_queue, reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import HostClock
from evenload.runtime.optim.parameter_units import FlatBuffer


class GradientReduction:
    """Sums one step's gradients over replicas, tied weights over both stages that hold them, and norms over a
    tensor-parallel group. `close` ends the queue after an error."""

    def __init__(self, buffers: Sequence[FlatBuffer], mesh: Mesh, *, is_overlapped: bool = False) -> None:
        self._buffers, self._mesh = buffers, mesh
        self._is_overlapped = is_overlapped
        self._has_replicated_stages = mesh.layout.has_replicated_stages
        self._shards = [buffer.shard(buffer.grads, mesh.data_rank, mesh.data_size) for buffer in buffers]
        # From the end of the model to its start. Tied ends of wide stages are summed at once in `finish`.
        summed = [at for at, buffer in enumerate(buffers) if not (buffer.tied and self._has_replicated_stages)]
        self._left = sorted(summed if mesh.data_size > 1 else [], key=lambda at: -buffers[at].unit)
        self._queued: list[int] = []  # units
        self._released: set[int] = set()
        self._squares: dict[int, Tensor] = {}
        self._queue = collective_queue(mesh.device, is_overlapped=is_overlapped and bool(self._left))

    def close(self) -> None:
        self._queue.close()

    def release(self, unit: int) -> None:
        """Mark a unit's gradients on this rank as complete. Takes no time."""
        self._released.add(unit)
        if self._is_overlapped:
            self._put_released()

    def finish(self) -> list[Tensor]:
        """Sum the rest and wait; return this rank's shard of every gradient, a view [padded / (dp·cp)]. Collective."""
        buffers, shards, mesh = self._buffers, self._shards, self._mesh
        self._released |= {buffer.unit for buffer in buffers}
        self._put_released()
        self._spans = self._queue.wait()
        for buffer, shard in zip(buffers, shards, strict=True):
            if buffer.tied:
                assert mesh.tie is not None
                # Ends with different numbers of ranks have other shards: sum the whole weight.
                tied = buffer.grads[: buffer.num_elements] if self._has_replicated_stages else shard
                dist.all_reduce(tied, op=dist.ReduceOp.SUM, group=mesh.tie)
        whole = [shard for buffer, shard in zip(buffers, shards, strict=True) if not buffer.is_part]
        if mesh.tensor is not None and whole:
            # Small, so in one transfer.
            summed = mesh.tensor.all_reduce(torch.cat(whole), "the sum of gradients of norms")
            for shard, part in zip(whole, summed.split([shard.numel() for shard in whole]), strict=True):
                shard.copy_(part)
        return shards

    def norm_and_loss(self, loss: Tensor) -> tuple[float, float]:
        """After `finish`, return the gradient's Euclidean norm, each parameter counted once, and the sum of all ranks'
        `loss`, an fp64 scalar on the device; the same on every rank. Collective."""
        mesh = self._mesh
        total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        total[1] = loss
        for at, (buffer, shard) in enumerate(zip(self._buffers, self._shards, strict=True)):
            # Counted once: the first and the last stage hold a tied weight with the same summed gradient, and every
            # rank of a tensor-parallel group holds what is not cut.
            if not (buffer.tied and mesh.is_last_stage) and (buffer.is_part or mesh.tp_rank == 0):
                total[0] += self._squares[at] if at in self._squares else _square_sum(shard)
        total = total.cpu()  # the step's only read of the device before its end
        dist.all_reduce(total, group=mesh.control)
        return float(total[0].sqrt()), float(total[1])

    def trace(self) -> NDArray[np.float64]:
        """Return starts and ends of the sums after `finish`, seconds on this rank's clock, [2, n]. Waits for a GPU."""
        return _seconds(self._queue.clock, self._spans)

    def _put_released(self) -> None:
        while self._left and self._buffers[self._left[0]].unit in self._released:
            at = self._left.pop(0)
            self._queued.append(self._buffers[at].unit)
            self._queue.put(functools.partial(self._sum, at))

    def _sum(self, at: int) -> None:
        # In place, so that it takes no memory from a backward.
        buffer, shard = self._buffers[at], self._shards[at]
        reduce_scatter_single(shard, buffer.grads, op=dist.ReduceOp.SUM, group=self._mesh.data)
        changes_later = buffer.tied or (self._mesh.tensor is not None and not buffer.is_part)
        if self._is_overlapped and not changes_later:
            self._squares[at] = _square_sum(shard)


class UpdatesInBackward(GradientReduction):
    """Has `update` called with a unit and this rank's shards of its gradients as soon as they are complete, and zeroes
    them, so that the next unit's can take their memory (`flatten_units`). What `finish` returns is zero."""

    def __init__(
        self, buffers: Sequence[FlatBuffer], mesh: Mesh, update: Callable[[int, Sequence[Tensor]], None]
    ) -> None:
        super().__init__(buffers, mesh)
        self._left.clear()  # nothing is queued: units are summed in `release`
        self._update = update

    def release(self, unit: int) -> None:
        if unit in self._released:
            return
        self._released.add(unit)
        of_unit = [at for at, buffer in enumerate(self._buffers) if buffer.unit == unit]
        for at in of_unit:
            if self._mesh.data_size > 1:
                self._sum(at)
            self._squares[at] = _square_sum(self._shards[at])
        self._update(unit, [self._shards[at] for at in of_unit])
        for at in of_unit:
            self._buffers[at].grads.zero_()

    def finish(self) -> list[Tensor]:
        for unit in sorted({buffer.unit for buffer in self._buffers}, reverse=True):
            self.release(unit)
        return super().finish()


_NORM_ELEMENTS = 2**12


def _square_sum(shard: Tensor) -> Tensor:
    """Return the sum of squares, in the shard's precision within some thousand elements, in fp64 over them: fp64 norms
    of fp32 gradients would copy them."""
    whole = shard.numel() - shard.numel() % _NORM_ELEMENTS
    parts = shard[:whole].view(-1, _NORM_ELEMENTS), shard[None, whole:]
    return torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts]).double().square().sum()


def _seconds(clock: HostClock, spans: Sequence[Span]) -> NDArray[np.float64]:
    """Return starts and ends in seconds, [2, n]."""
    return np.array([clock.seconds(span) for span in spans], np.float64).reshape(-1, 2).T


class GatherTrace(NamedTuple):
    """Records when one rank's gathers of an update ran, and its waits: starts and ends in seconds, [2, n] each."""

    gathers: NDArray[np.float64]
    waits: NDArray[np.float64]


class WeightGathers:
    """Gathers one update's weights on one rank, overlapped with the next packs or each as it is put."""

    def __init__(self, mesh: Mesh, *, is_overlapped: bool = False) -> None:
        self.is_overlapped = is_overlapped and mesh.data_size > 1
        self._mesh = mesh
        self._queue = collective_queue(mesh.device, is_overlapped=self.is_overlapped)
        self._last: dict[int, int] = {}  # by unit that nobody has waited for, the number of its last gather
        self._waits: list[Span] = []
        self._is_taken = False

    def put(self, buffer: FlatBuffer) -> None:
        """Queue the gather of a buffer, whose shard on this rank is final."""
        if self._mesh.data_size == 1:
            return
        number = self._queue.put(functools.partial(self._gather, buffer))
        if self.is_overlapped:
            self._last[buffer.unit] = number

    def seal(self) -> None:
        self._queue.seal()

    def await_unit(self, unit: int) -> None:
        """Wait until a unit's weights are whole; takes no time where they are."""
        if self._last and (number := self._last.get(unit)) is not None:
            with self._waiting(f"the updated weights of unit {unit}"):
                self._queue.await_call(number)
            self._last.pop(unit, None)

    def finish(self) -> None:
        """Wait until all weights of this rank are complete; raise what a gather raised."""
        if self._last:
            with self._waiting("the updated weights"):
                self._queue.wait()
            self._last.clear()

    def take_traces(self, mesh: Mesh) -> list[GatherTrace]:
        """Finish; return the trace once, and none in another layout. Waits for a GPU."""
        self.finish()
        if self._is_taken or mesh is not self._mesh:
            return []
        self._is_taken = True
        clock = self._queue.clock
        return [GatherTrace(_seconds(clock, self._queue.wait()), _seconds(clock, self._waits))]

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        start = self._queue.clock.mark()
        with self._mesh.watch.waiting(what, f"the ranks that hold stage {self._mesh.pipeline_stage}"):
            yield
        self._waits.append(Span(start, self._queue.clock.mark()))

    def _gather(self, buffer: FlatBuffer) -> None:
        # A copy: its own memory is written meanwhile.
        shard = buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size).clone()
        all_gather_single(buffer.values, shard, group=self._mesh.data)
