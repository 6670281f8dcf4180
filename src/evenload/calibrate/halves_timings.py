"""What tensor-parallel transfers of one half of a pack and the other half cost each other, on a CPU.

As `beside_timings`: gloo moves bytes with the cores that compute. One trial reads both: a few transfers through the
queue that halves use, and products of matrices until they are done; and halves hand each other the turn, doing nothing.
All groups of the layout at once, as in a step. Not on a GPU (`BesideHalves` has the assumption).

Price: some 0.1 s.
"""

import math
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist

from evenload.cost.coefficients import BesideHalves
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.comm.transfer_queue import transfer_queue
from evenload.runtime.comm.turns import Turns

_NUM_TRANSFERS = 6
_NUM_TRIALS = 3
_ELEMENTS = 1 << 19
_PRODUCT_SIZE = 256
_TURNS_OF_LAYER = 12
"""Of both halves together, in either direction (`runtime/replay/tensor_parallel.py`)."""
_NUM_TURNS = 200


def beside_halves(mesh: Mesh) -> BesideHalves | None:
    """Medians of one rank; None on a GPU, and without tensor parallelism. Collective over the tensor-parallel group."""
    if mesh.tensor is None or mesh.device.type != "cpu":
        return None
    trials = [_trial(mesh) for _ in range(1 + _NUM_TRIALS)][1:]
    stretch, lost = (statistics.median(column) for column in zip(*trials, strict=True))
    # Below 0 where the trial alone was disturbed.
    slowdown = min(1.0, max(0.0, lost))
    return BesideHalves(stretch=stretch, slowdown=slowdown, turns_s=_turns_seconds(mesh.device))


def measured_halves(meshes: Meshes) -> BesideHalves | None:
    """Medians over all ranks, which have the same answer; None as `beside_halves`. Collective over all ranks of the
    run, idle ones too; tp is the same in all layouts."""
    mesh = meshes.start
    own = None if mesh.is_idle else beside_halves(mesh)
    told = [math.nan] * 3 if own is None else [own.stretch, own.slowdown, own.turns_s]
    everyone = torch.empty(3 * mesh.num_ranks, dtype=torch.float64)
    all_gather_single(everyone, torch.tensor(told, dtype=torch.float64), group=mesh.control)
    known = [row for row in everyone.view(-1, 3).tolist() if not math.isnan(row[0])]
    if not known:
        return None
    stretch, slowdown, turns_s = np.median(known, axis=0).tolist()
    return BesideHalves(stretch=stretch, slowdown=slowdown, turns_s=turns_s)


def _trial(mesh: Mesh) -> tuple[float, float]:
    """How many times as long transfers take beside products, and the share of that time that products lose."""
    assert mesh.tensor is not None
    size, group = mesh.layout.tp, mesh.tensor.process_group
    own = torch.zeros(-(-_ELEMENTS // size))
    everyone = own.new_empty(size * len(own))
    square = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)

    def transfer() -> None:
        all_gather_single(everyone, own, group=group)

    dist.barrier(group=group)
    from_s = time.perf_counter()
    for _ in range(_NUM_TRANSFERS):
        transfer()
    alone_s = time.perf_counter() - from_s
    dist.barrier(group=group)
    num_alone = 0
    from_s = time.perf_counter()
    while not num_alone or time.perf_counter() - from_s < alone_s:
        square @ square
        num_alone += 1
    product_s = (time.perf_counter() - from_s) / num_alone
    dist.barrier(group=group)
    transfers = transfer_queue(mesh.device)
    done: list[float] = []
    from_s = time.perf_counter()
    under_way = [transfers.start(transfer) for _ in range(_NUM_TRANSFERS)]
    last = transfers.start(lambda: done.append(time.perf_counter()))
    products = 0
    while not done:
        square @ square
        products += 1
    for pending in (*under_way, last):
        pending.wait()
    beside_s = done[0] - from_s
    return beside_s / alone_s, 1 - products * product_s / beside_s


def _turns_seconds(device: torch.device) -> float:
    """Of a layer: what it takes that halves hand each other the turn."""
    turns = Turns(transfer_queue(device), lambda: lambda: None)

    def half() -> None:
        for _ in range(_NUM_TURNS // 2):
            turns.next()

    from_s = time.perf_counter()
    turns.run(half, half)
    return (time.perf_counter() - from_s) / _NUM_TURNS * _TURNS_OF_LAYER
