"""`WeightGathers`: every rank's updated shard goes to the ranks that hold the same weights, beside the next forwards.

An update runs unit by unit from the start of the model to its end, and each unit's gather is put into a queue beside
compute at once (`comm.side_queue`): embedding, layers upwards, head, the order in which the next step's first forward
reads them, on every rank that holds them, so nobody negotiates. A forward waits for the gathers of its own unit and of
those before it, and for no other.

Nothing deadlocks: a rank puts all gathers of an update before it begins any action of the next step, and a gather waits
for nothing but the updates of the other ranks. So no chain of waits leads from a gather to an action, whatever packs
and schedules the next step has and whoever shares them, also on devices that run a rank's transfers in one queue, where
all gathers stand before all of the step's transfers. Sums of gradients use the same group: the executor finishes the
gathers before its first backward, so on every rank all gathers come before the first sum.

Whoever reads whole weights otherwise (checkpoints, exports, changes of the layout) calls `finish` first.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.comm.side_queue import Span, side_queue
from evenload.runtime.optim.parameter_units import FlatBuffer


@dataclass(frozen=True, eq=False)
class GatherTrace:
    """When one rank's gathers of one update ran, in their order, and when something of this rank waited for them;
    seconds on its own monotonic clock.

    Args:
        unit: int32[n], numbers of `StageModel.units`; start_s, end_s: float64[n].
        wait_start_s, wait_end_s: float64[m].
    """

    unit: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    wait_start_s: NDArray[np.float64]
    wait_end_s: NDArray[np.float64]


class WeightGathers:
    """The gathers of one update on one rank.

    Args:
        is_overlapped: beside what is computed next; else each where it is put.
    """

    def __init__(self, mesh: Mesh, *, is_overlapped: bool = False) -> None:
        self.is_overlapped = is_overlapped and mesh.data_size > 1
        self._mesh = mesh
        self._queue = side_queue(mesh.device, is_beside=self.is_overlapped)
        self._units: list[int] = []
        self._last: dict[int, int] = {}  # by unit that nobody has waited for, the number of its last gather
        self._waits: list[Span] = []
        self._is_told = False

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
        """Until a unit's weights are whole; of a unit whose weights are, no time."""
        if self._last and (number := self._last.get(unit)) is not None:
            with self._waiting(f"the updated weights of unit {unit}"):
                self._queue.await_call(number)
            self._last.pop(unit, None)  # what was not waited for to the end is not whole

    def finish(self) -> None:
        """Until all weights of this rank are whole. Raises what a gather raised."""
        if self._last:
            with self._waiting("the updated weights"):
                self._queue.wait()
            self._last.clear()

    def untold(self, mesh: Mesh) -> list[GatherTrace]:
        """What has not been told yet, nothing in another layout than that of the update; finishes all. Waits for a
        GPU."""
        self.finish()
        if self._is_told or mesh is not self._mesh:
            return []
        self._is_told = True
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
