"""What sums of gradients, gathers of weights, or of keys and values, and packs cost each other at once, on a CPU.

gloo moves bytes with the cores that compute, so neither is free: a transfer takes longer, and compute loses time. Both
are read from one trial: a few transfers in a thread, as a step runs them, and products of matrices until they are done.
All groups of the layout at once, as in a step. Not on a GPU: its transfers have copy engines and a few of its
processors, and what they take from kernels has not been measured yet (`BesideCompute` has the assumption).

Price: some 0.1 s each.
"""

import math
import statistics
import time
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from evenload.cost.coefficients import BesideCompute
from evenload.runtime.comm.collectives import all_gather_single, reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.comm.side_queue import ThreadQueue

Transferred = Literal["sums", "gathers", "context"]

_NUM_CALLS = 6
_NUM_TRIALS = 3
_ELEMENTS = 1 << 19
_PRODUCT_SIZE = 256


class _Trial(NamedTuple):
    alone_s: float
    product_s: float
    beside_s: float
    products: int


def beside_compute(mesh: Mesh, what: Transferred) -> BesideCompute | None:
    """Medians of one rank; None on a GPU, and where nothing is summed, or no documents are shared. Collective over the
    data group, or over the largest one that shares documents."""
    group = _group(mesh, what)
    if group is None or group.size() == 1 or mesh.device.type != "cpu":
        return None
    trials = [_trial(mesh.device, group, what) for _ in range(1 + _NUM_TRIALS)][1:]
    stretch = statistics.median(one.beside_s / (_NUM_CALLS * one.alone_s) for one in trials)
    # What compute lost of the time in which sums ran; below 0 where the trial alone was disturbed.
    slowdown = statistics.median(1 - one.products * one.product_s / one.beside_s for one in trials)
    return BesideCompute(stretch=stretch, slowdown=min(1.0, max(0.0, slowdown)))


def measured_beside(meshes: Meshes, what: Transferred) -> BesideCompute | None:
    """Of the layout in which most ranks sum, or may share documents, medians over all ranks, which have the same
    answer; None as `beside_compute`. Collective over all ranks of the run, idle ones too."""
    mesh = max((meshes.of(layout) for layout in meshes.layouts), key=lambda one: max(one.layout.data_sizes))
    if what == "context":
        mesh = max((meshes.of(layout) for layout in meshes.layouts), key=lambda one: one.layout.dp * one.layout.cp)
    own = None if mesh.is_idle else beside_compute(mesh, what)
    told = torch.tensor([math.nan, math.nan] if own is None else [own.stretch, own.slowdown], dtype=torch.float64)
    everyone = told.new_empty(2 * mesh.num_ranks)
    all_gather_single(everyone, told, group=mesh.control)
    known = [row for row in everyone.view(-1, 2).tolist() if not math.isnan(row[0])]
    if not known:
        return None
    stretch, slowdown = np.median(known, axis=0).tolist()
    return BesideCompute(stretch=stretch, slowdown=slowdown)


def _group(mesh: Mesh, what: Transferred) -> dist.ProcessGroup | None:
    if what != "context":
        return mesh.data
    return max(mesh.context.values(), key=lambda one: one.size).process_group if mesh.context else None


def _trial(device: torch.device, group: dist.ProcessGroup, what: Transferred) -> _Trial:
    count = -(-_ELEMENTS // group.size()) * group.size()
    whole = torch.zeros(count)
    shard = whole[: count // group.size()]
    square = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)

    def one_call() -> None:
        if what == "sums":
            reduce_scatter_single(shard, whole, op=dist.ReduceOp.SUM, group=group)
        else:
            all_gather_single(whole, shard.clone(), group=group)

    dist.barrier(group=group)
    from_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        one_call()
    alone_s = (time.perf_counter() - from_s) / _NUM_CALLS
    dist.barrier(group=group)
    num_alone = 0
    from_s = time.perf_counter()
    while not num_alone or time.perf_counter() - from_s < _NUM_CALLS * alone_s:
        square @ square
        num_alone += 1
    product_s = (time.perf_counter() - from_s) / num_alone
    dist.barrier(group=group)
    queue = ThreadQueue(device)
    done: list[float] = []
    from_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        queue.put(one_call)
    queue.put(lambda: done.append(time.perf_counter()))
    products = 0
    while not (done or queue.has_failed):
        square @ square
        products += 1
    queue.wait()
    return _Trial(alone_s, product_s, done[0] - from_s, products)
