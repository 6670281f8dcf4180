"""What replicas send each other in a step, overlapped with compute: gradients into shards, updated weights back.

**Gradients** (`GradientReduction`, a reduce-scatter a unit). Every rank's loss is already divided by the label count of
the global batch, so gradients are summed, never averaged. A unit's gradients travel as soon as the last pack has added
to them: the head's first, the embedding's last, in the same order on all ranks that hold them. No action waits for a
sum, so no circle of waits is possible as long as no replica waits for another inside a pack (docs/decisions/03); steps
whose packs replicas share reduce after the last action. Either way results are equal to the bit. Each unit's squares
are summed behind its reduce-scatter, so that one number a rank is left for the norm. Never overlapped: what ties both
ends of a pipeline, and the gradients of norms inside a tensor-parallel group.

**Weights** (`WeightGathers`, an all-gather a unit). An update runs from the embedding to the head, the order in which
the next forward reads them, and queues each unit's gather at once; a forward waits for its own unit alone. Whoever
reads whole weights otherwise calls `finish` first. All gathers of an update are queued before any action of the next
step, and finished before its first backward, so they never wait for an action and always come before the first sum.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from evenload.runtime.comm.collectives import Span, all_gather_single, collective_queue, reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.parameter_units import FlatBuffer


@dataclass(frozen=True, eq=False)
class ReductionTrace:
    """When one rank's sums ran, in their order: units, int32[n], and seconds on its own clock, float64[n]."""

    unit: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


class GradientReduction:
    """Sums one step's gradients over replicas, tied weights over both stages that hold them, and norms over a
    tensor-parallel group. A context, which lets go of what an error leaves behind."""

    def __init__(self, buffers: Sequence[FlatBuffer], mesh: Mesh, *, is_overlapped: bool = False) -> None:
        self._buffers, self._mesh = buffers, mesh
        self._is_overlapped = is_overlapped
        self._has_wide_stages = mesh.layout.has_wide_stages
        self._shards = [buffer.shard(buffer.grads, mesh.data_rank, mesh.data_size) for buffer in buffers]
        # From the end of the model to its start, the buffers of a unit as they stand. Tied ends of wide stages are
        # summed at once in `finish`.
        summed = [at for at, buffer in enumerate(buffers) if not (buffer.tied and self._has_wide_stages)]
        self._left = sorted(summed if mesh.data_size > 1 else [], key=lambda at: -buffers[at].unit)
        self._queued: list[int] = []
        self._released: set[int] = set()
        self._squares: dict[int, Tensor] = {}
        self._queue = collective_queue(mesh.device, is_overlapped=is_overlapped and bool(self._left))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._queue.close()

    def release(self, unit: int) -> None:
        """All gradients of a unit of this rank are there. Takes no time."""
        self._released.add(unit)
        if self._is_overlapped:
            self._put_released()

    def finish(self) -> list[Tensor]:
        """Sum what is left and wait for all; return this rank's shard of every buffer's gradient, a view of it, [padded
        / (dp·cp)] each. Collective over the groups of `mesh`."""
        buffers, shards, mesh = self._buffers, self._shards, self._mesh
        self._released |= {buffer.unit for buffer in buffers}
        self._put_released()
        self._spans = self._queue.wait()
        for buffer, shard in zip(buffers, shards, strict=True):
            if buffer.tied:
                assert mesh.tie is not None
                # Where both ends have not as many ranks, their shards are not the same elements: the whole weight.
                tied = buffer.grads[: buffer.num_elements] if self._has_wide_stages else shard
                dist.all_reduce(tied, op=dist.ReduceOp.SUM, group=mesh.tie)
        whole = [shard for buffer, shard in zip(buffers, shards, strict=True) if not buffer.is_part]
        if mesh.tensor is not None and whole:
            # They are small: in one transfer.
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
            # A tied weight is held by the first and the last stage with the same summed gradient, and what is not cut
            # by every rank of a tensor-parallel group.
            if not (buffer.tied and mesh.is_last_stage) and (buffer.is_part or mesh.tp_rank == 0):
                total[0] += self._squares[at] if at in self._squares else _square_sum(shard)
        total = total.cpu()  # The step's only read of the device before its end: clipping and metrics need it.
        dist.all_reduce(total, group=mesh.control)
        return float(total[0].sqrt()), float(total[1])

    def trace(self) -> ReductionTrace:
        """Return when sums ran, after `finish`. Waits for a GPU."""
        return ReductionTrace(
            unit=np.array([self._buffers[at].unit for at in self._queued], np.int32),
            start_s=np.array(self._queue.clock.seconds([span.start for span in self._spans]), np.float64),
            end_s=np.array(self._queue.clock.seconds([span.end for span in self._spans]), np.float64),
        )

    def _put_released(self) -> None:
        while self._left and self._buffers[self._left[0]].unit in self._released:
            at = self._left.pop(0)
            self._queued.append(at)
            self._queue.put(functools.partial(self._sum, at))

    def _sum(self, at: int) -> None:
        # In place, so that sums during a backward take no memory from it.
        buffer, shard = self._buffers[at], self._shards[at]
        reduce_scatter_single(shard, buffer.grads, op=dist.ReduceOp.SUM, group=self._mesh.data)
        # Tied ends, and norms in a tensor-parallel group, are added to later.
        changes_later = buffer.tied or (self._mesh.tensor is not None and not buffer.is_part)
        if self._is_overlapped and not changes_later:
            self._squares[at] = _square_sum(shard)


def _square_sum(shard: Tensor) -> Tensor:
    """Sum of a gradient's squares, fp64 scalar on the device."""
    return torch.linalg.vector_norm(shard, dtype=torch.float64).square()


@dataclass(frozen=True, eq=False)
class GatherTrace:
    """When one rank's gathers of an update ran, as `ReductionTrace`, and when this rank waited, float64[m]."""

    unit: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    wait_start_s: NDArray[np.float64]
    wait_end_s: NDArray[np.float64]


class WeightGathers:
    """The gathers of one update on one rank, overlapped with the next packs or each where it is put."""

    def __init__(self, mesh: Mesh, *, is_overlapped: bool = False) -> None:
        self.is_overlapped = is_overlapped and mesh.data_size > 1
        self._mesh = mesh
        self._queue = collective_queue(mesh.device, is_overlapped=self.is_overlapped)
        self._units: list[int] = []
        self._last: dict[int, int] = {}  # by unit that nobody has waited for, the number of its last gather
        self._waits: list[Span] = []
        self._is_taken = False

    def put(self, buffer: FlatBuffer) -> None:
        """This rank's shard of a buffer's values is final."""
        if self._mesh.data_size == 1:
            return
        number = self._queue.put(functools.partial(self._gather, buffer))
        self._units.append(buffer.unit)
        if self.is_overlapped:
            self._last[buffer.unit] = number

    def seal(self) -> None:
        """All are put."""
        self._queue.seal()

    def await_unit(self, unit: int) -> None:
        """Wait until a unit's weights are whole; takes no time where they are."""
        if self._last and (number := self._last.get(unit)) is not None:
            with self._waiting(f"the updated weights of unit {unit}"):
                self._queue.await_call(number)
            self._last.pop(unit, None)  # what was not waited for to the end is not whole

    def finish(self) -> None:
        """Wait until all weights of this rank are whole; raise what a gather raised."""
        if self._last:
            with self._waiting("the updated weights"):
                self._queue.wait()
            self._last.clear()

    def take_traces(self, mesh: Mesh) -> list[GatherTrace]:
        """Finish; return traces that nobody has taken, none in another layout. Waits for a GPU."""
        self.finish()
        if self._is_taken or mesh is not self._mesh:
            return []
        self._is_taken = True
        spans, clock = self._queue.wait(), self._queue.clock
        spans_s, waits_s = (
            np.array([clock.seconds(span) for span in marks], np.float64).reshape(-1, 2)
            for marks in (spans, self._waits)
        )
        return [GatherTrace(np.array(self._units, np.int32), *spans_s.T, *waits_s.T)]

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        start = self._queue.clock.mark()
        with self._mesh.watch.waiting(what, f"the ranks that hold stage {self._mesh.pipeline_stage}"):
            yield
        self._waits.append(Span(start, self._queue.clock.mark()))

    def _gather(self, buffer: FlatBuffer) -> None:
        # A copy, so that what is sent does not lie where the same values arrive.
        shard = buffer.shard(buffer.values, self._mesh.data_rank, self._mesh.data_size).clone()
        all_gather_single(buffer.values, shard, group=self._mesh.data)
