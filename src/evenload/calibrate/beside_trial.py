"""One trial of transfers beside compute, on a CPU: how much longer they take, and what compute loses.

gloo moves bytes with the cores that compute, so neither is free. Both are read from one trial: transfers in the thread
that a step runs them in, and products of matrices until they are done; either alone, just before. Who times a kind of
transfer says what one is and which queue it goes through.

Where ranks meet inside of what they compute (keys and values of packs that they share), products alone say too little:
a transfer takes cores from one rank at a time, and the others wait for that one. Then ranks meet in the trial as well,
some products apart (docs/decisions/0058-sums-beside-meetings.md).

Price: some 0.2 s for `beside_rates`, 2 s with meetings.
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh

ELEMENTS = 1 << 19
"""Of a transfer, over all ranks of its group; float32."""
_NUM_CALLS = 6
_NUM_TRIALS = 7
_PRODUCT_SIZE = 256
# Some 10 ms between meetings, as in a layer of a small pack; of so many the time alone is taken.
_PRODUCTS_BETWEEN = 16
_ALONE_MEETINGS = 4
# Products and meetings last so many times what transfers take alone, to outlast them beside compute.
_LONGER = 4


class CallQueue(Protocol):
    """Runs the calls of one trial beside compute."""

    @property
    def has_failed(self) -> bool:
        """A call has raised, so that those behind it never run."""
        ...

    def put(self, call: Callable[[], object]) -> object:
        """Run a call after those before it. Does not wait."""
        ...

    def wait(self) -> object:
        """Until all calls are done; raises what one of them raised."""
        ...


class _Trial(NamedTuple):
    """How many times as long transfers took beside compute, and the share of that time that compute lost."""

    stretch: float
    lost: float


def beside_rates(
    group: dist.ProcessGroup,
    transfer: Callable[[], object],
    new_queue: Callable[[], CallQueue],
    meet: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """(how many times as long a transfer takes beside compute, the share of that time that compute loses), medians of
    one rank. Collective over the group.

    Args:
        meet: what ranks of the group wait for each other in while they compute; None = nothing.
    """
    one = _trial if meet is None else partial(_trial_with_meetings, meet=meet)
    trials = [one(group, transfer, new_queue()) for _ in range(1 + _NUM_TRIALS)][1:]
    stretch, lost = (statistics.median(found) for found in zip(*trials, strict=True))
    # Below 0 where the trial alone was disturbed.
    return stretch, min(1.0, max(0.0, lost))


def medians_over_ranks(mesh: Mesh, own: tuple[float, ...] | None, count: int) -> list[float] | None:
    """Medians of what all ranks have measured, `count` numbers each; None where no rank has any. All ranks have the
    same answer. Collective over all ranks of the run, idle ones too."""
    told = torch.tensor([math.nan] * count if own is None else own, dtype=torch.float64)
    everyone = told.new_empty(count * mesh.num_ranks)
    all_gather_single(everyone, told, group=mesh.control)
    known = [row for row in everyone.view(-1, count).tolist() if not math.isnan(row[0])]
    return np.median(known, axis=0).tolist() if known else None


def _trial(group: dist.ProcessGroup, transfer: Callable[[], object], queue: CallQueue) -> _Trial:
    square = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
    alone_s = _seconds_alone(group, transfer)
    dist.barrier(group=group)
    num_alone = 0
    from_s = time.perf_counter()
    while not num_alone or time.perf_counter() - from_s < _NUM_CALLS * alone_s:
        square @ square
        num_alone += 1
    product_s = (time.perf_counter() - from_s) / num_alone
    done, from_s = _started(group, transfer, queue)
    products = 0
    while not (done or queue.has_failed):
        square @ square
        products += 1
    queue.wait()
    beside_s = done[0] - from_s
    return _Trial(beside_s / (_NUM_CALLS * alone_s), 1 - products * product_s / beside_s)


def _trial_with_meetings(
    group: dist.ProcessGroup, transfer: Callable[[], object], queue: CallQueue, meet: Callable[[], object]
) -> _Trial:
    """Ranks meet equally often, whatever transfers take."""
    square = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)

    def computed_s(meetings: int) -> float:
        from_s = time.perf_counter()
        for _ in range(meetings):
            for _ in range(_PRODUCTS_BETWEEN):
                square @ square
            meet()
        return time.perf_counter() - from_s

    alone_s = _seconds_alone(group, transfer)
    dist.barrier(group=group)
    meeting_s = computed_s(_ALONE_MEETINGS) / _ALONE_MEETINGS
    slowest = torch.tensor([alone_s, 1 / meeting_s], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    meetings = math.ceil(_LONGER * _NUM_CALLS * slowest.prod().item())
    done, from_s = _started(group, transfer, queue)
    took_s = computed_s(meetings)
    queue.wait()
    beside_s = done[0] - from_s
    return _Trial(beside_s / (_NUM_CALLS * alone_s), (took_s - meetings * meeting_s) / min(beside_s, took_s))


def _seconds_alone(group: dist.ProcessGroup, transfer: Callable[[], object]) -> float:
    """Of one transfer, mean."""
    dist.barrier(group=group)
    from_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        transfer()
    return (time.perf_counter() - from_s) / _NUM_CALLS


def _started(group: dist.ProcessGroup, transfer: Callable[[], object], queue: CallQueue) -> tuple[list[float], float]:
    """All transfers of a trial, begun; (when they are done, once they are; since when they run)."""
    dist.barrier(group=group)
    done: list[float] = []
    from_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        queue.put(transfer)
    queue.put(lambda: done.append(time.perf_counter()))
    return done, from_s
