"""What sums of gradients or gathers of weights and packs cost each other at once, on a CPU.

By trials as in `beside_trial`, all groups of the layout at once, as in a step. Not on a GPU: its transfers have copy
engines and a few of its processors, and what they take from kernels has not been measured yet (`BesideCompute` has the
assumption).

Context ranks meet in every layer of what they compute, so under `cp` they meet in the trials of sums and of gathers of
weights, too.

Price: some 0.2 s each, 2 s where context ranks meet.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from evenload.calibrate.beside_trial import ELEMENTS, beside_rates, medians_over_ranks
from evenload.cost.coefficients import BesideCompute
from evenload.runtime.comm.collectives import all_gather_single, reduce_scatter_single
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.comm.side_queue import ThreadQueue

Transferred = Literal["sums", "gathers"]
_MET_ELEMENTS = 1 << 16
"""float32, that every rank brings to a meeting: keys and values of some hundred tokens."""


def beside_compute(mesh: Mesh, what: Transferred) -> BesideCompute | None:
    """Medians of one rank; None on a GPU, and where nothing is summed. Collective over the data group."""
    group = mesh.data
    if group is None or group.size() == 1 or mesh.device.type != "cpu":
        return None
    count = -(-ELEMENTS // group.size()) * group.size()
    whole = torch.zeros(count)
    shard = whole[: count // group.size()]

    def transfer() -> None:
        if what == "sums":
            reduce_scatter_single(shard, whole, op=dist.ReduceOp.SUM, group=group)
        else:
            all_gather_single(whole, shard.clone(), group=group)

    stretch, slowdown = beside_rates(group, transfer, partial(ThreadQueue, mesh.device), _meeting(mesh))
    return BesideCompute(stretch=stretch, slowdown=slowdown)


def measured_beside(meshes: Meshes, what: Transferred) -> BesideCompute | None:
    """Of the layout in which most ranks sum, medians over all ranks, which have the same answer; None as
    `beside_compute`. Collective over all ranks of the run, idle ones too."""
    mesh = max((meshes.of(layout) for layout in meshes.layouts), key=lambda one: max(one.layout.data_sizes))
    own = None if mesh.is_idle else beside_compute(mesh, what)
    found = medians_over_ranks(mesh, None if own is None else (own.stretch, own.slowdown), 2)
    return None if found is None else BesideCompute(stretch=found[0], slowdown=found[1])


def _meeting(mesh: Mesh) -> Callable[[], object] | None:
    """Of this rank's context ranks; None where there is one. DP-Merge is left out: its steps sum after their packs."""
    if mesh.layout.cp == 1:
        return None
    own = next(group for group in mesh.context.values() if group.size == mesh.layout.cp)
    mine, whole = torch.zeros(_MET_ELEMENTS), torch.zeros(_MET_ELEMENTS * own.size)
    return lambda: all_gather_single(whole, mine, group=own.process_group)
