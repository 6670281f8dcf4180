"""Measure how much collective communication and compute slow each other on a CPU.

gloo moves bytes with the cores that compute, so neither is free. Both slowdowns are read from one trial:
reduce-scatters and all-gathers, as a step has them, in the thread that a step runs them in, and matrix products until
they are done; each alone just before. All groups of the layout at once, as in a step. On a GPU transfers have copy
engines and few processors; what they take from kernels is assumed (`OverlapCost`).

Price: some 0.4 s.
"""

import math
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from evenload.cost.coefficients import OverlapCost
from evenload.runtime.comm.collectives import ThreadQueue, all_gather_single, reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh, Meshes

_ELEMENTS = 1 << 19
"""float32 of one transfer, over all ranks of its group."""
_NUM_CALLS, _NUM_TRIALS, _PRODUCT_SIZE = 6, 7, 256


def overlap_cost(mesh: Mesh) -> OverlapCost | None:
    """Return medians of one rank; None on a GPU, and where no two ranks hold the same weights. Collective over the data
    group."""
    group = mesh.data
    if mesh.device.type != "cpu" or group is None or group.size() == 1:
        return None
    whole = torch.zeros(-(-_ELEMENTS // group.size()) * group.size())
    shard = whole[: len(whole) // group.size()]

    def transfer() -> None:
        reduce_scatter_single(shard, whole, op=dist.ReduceOp.SUM, group=group)
        all_gather_single(whole, shard.clone(), group=group)

    trials = [_trial(mesh, group, transfer) for _ in range(1 + _NUM_TRIALS)][1:]
    communication, compute = (statistics.median(column) for column in zip(*trials, strict=True))
    # Below 0 where the part of the trial that ran alone was disturbed.
    return OverlapCost(communication_slowdown=communication, compute_slowdown=min(1.0, max(0.0, compute)))


def measured_overlap(meshes: Meshes) -> OverlapCost | None:
    """Return medians over all ranks, in the layout in which most of them hold the same weights; the same on every rank,
    None as `overlap_cost`. Collective over all ranks of the run, idle ones too."""
    mesh = max((meshes.of(layout) for layout in meshes.layouts), key=lambda one: max(one.layout.data_sizes))
    own = None if mesh.is_idle else overlap_cost(mesh)
    pair = (math.nan, math.nan) if own is None else (own.communication_slowdown, own.compute_slowdown)
    mine = torch.tensor(pair, dtype=torch.float64)
    everyone = mine.new_empty(2 * mesh.num_ranks)
    all_gather_single(everyone, mine, group=mesh.control)
    known = [row for row in everyone.view(-1, 2).tolist() if not math.isnan(row[0])]
    if not known:
        return None
    communication, compute = np.median(known, axis=0).tolist()
    return OverlapCost(communication_slowdown=communication, compute_slowdown=compute)


def _trial(mesh: Mesh, group: dist.ProcessGroup, transfer) -> tuple[float, float]:
    """How many times as long transfers took beside compute, and the share of that time that compute lost."""
    square = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
    dist.barrier(group=group)
    start_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        transfer()
    alone_s = time.perf_counter() - start_s
    dist.barrier(group=group)
    products = 0
    start_s = time.perf_counter()
    while not products or time.perf_counter() - start_s < alone_s:
        square @ square
        products += 1
    product_s = (time.perf_counter() - start_s) / products
    dist.barrier(group=group)
    queue, done = ThreadQueue(mesh.device), []
    products = 0
    start_s = time.perf_counter()
    for _ in range(_NUM_CALLS):
        queue.put(transfer)
    queue.put(lambda: done.append(time.perf_counter()))
    while not (done or queue.has_failed):
        square @ square
        products += 1
    queue.wait()
    beside_s = done[0] - start_s
    return beside_s / alone_s, 1 - products * product_s / beside_s
