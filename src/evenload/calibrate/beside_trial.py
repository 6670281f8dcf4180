"""One trial of transfers beside compute, on a CPU: how much longer they take, and what compute loses.

gloo moves bytes with the cores that compute, so neither is free. Both are read from one trial: transfers in the thread
that a step runs them in, and products of matrices until they are done; either alone, just before. Who times a kind of
transfer says what one is and which queue it goes through.

Price: some 0.2 s for `beside_rates`.
"""

import math
import statistics
import time
from collections.abc import Callable
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
    alone_s: float
    product_s: float
    beside_s: float
    products: int


def beside_rates(
    group: dist.ProcessGroup, transfer: Callable[[], object], new_queue: Callable[[], CallQueue]
) -> tuple[float, float]:
    """(how many times as long a transfer takes beside compute, the share of that time that compute loses), medians of
    one rank. Collective over the group."""
    trials = [_trial(group, transfer, new_queue()) for _ in range(1 + _NUM_TRIALS)][1:]
    stretch = statistics.median(one.beside_s / (_NUM_CALLS * one.alone_s) for one in trials)
    lost = statistics.median(1 - one.products * one.product_s / one.beside_s for one in trials)
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
    dist.barrier(group=group)
    from_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        transfer()
    alone_s = (time.perf_counter() - from_s) / _NUM_CALLS
    dist.barrier(group=group)
    num_alone = 0
    from_s = time.perf_counter()
    while not num_alone or time.perf_counter() - from_s < _NUM_CALLS * alone_s:
        square @ square
        num_alone += 1
    product_s = (time.perf_counter() - from_s) / num_alone
    dist.barrier(group=group)
    done: list[float] = []
    from_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        queue.put(transfer)
    queue.put(lambda: done.append(time.perf_counter()))
    products = 0
    while not (done or queue.has_failed):
        square @ square
        products += 1
    queue.wait()
    return _Trial(alone_s, product_s, done[0] - from_s, products)
