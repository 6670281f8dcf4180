"""What tensor-parallel transfers of one half of a pack and the other half cost each other, on a CPU.

By trials as in `beside_trial`, through the queue that halves use; and halves hand each other the turn, doing nothing.
All groups of the layout at once, as in a step. Not on a GPU (`BesideHalves` has the assumption).

Price: some 0.1 s.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from evenload.calibrate.beside_trial import ELEMENTS, beside_rates, medians_over_ranks
from evenload.cost.coefficients import BesideHalves
from evenload.runtime.comm.collectives import all_gather_single
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.comm.transfer_queue import Pending, transfer_queue
from evenload.runtime.comm.turns import Turns

_TURNS_OF_LAYER = 12
"""Of both halves together, in either direction (`runtime/replay/tensor_parallel.py`)."""
_NUM_TURNS = 200


class _Transfers:
    """The queue of halves, as a trial wants it: a call that fails does not stop those behind it."""

    has_failed = False

    def __init__(self, device: torch.device) -> None:
        self._transfers = transfer_queue(device)
        self._under_way: list[Pending] = []

    def put(self, call: Callable[[], object]) -> None:
        self._under_way.append(self._transfers.start(call))

    def wait(self) -> None:
        for pending in self._under_way:
            pending.wait()


def beside_halves(mesh: Mesh) -> BesideHalves | None:
    """Medians of one rank; None on a GPU, and without tensor parallelism. Collective over the tensor-parallel group."""
    if mesh.tensor is None or mesh.device.type != "cpu":
        return None
    size, group = mesh.layout.tp, mesh.tensor.process_group
    own = torch.zeros(-(-ELEMENTS // size))
    everyone = own.new_empty(size * len(own))

    def transfer() -> None:
        all_gather_single(everyone, own, group=group)

    stretch, slowdown = beside_rates(group, transfer, partial(_Transfers, mesh.device))
    return BesideHalves(stretch=stretch, slowdown=slowdown, turns_s=_turns_seconds(mesh.device), host_turns_s=0.0)


def measured_halves(meshes: Meshes) -> BesideHalves | None:
    """Medians over all ranks, which have the same answer; None as `beside_halves`. Collective over all ranks of the
    run, idle ones too; tp is the same in all layouts."""
    mesh = meshes.start
    own = None if mesh.is_idle else beside_halves(mesh)
    found = medians_over_ranks(mesh, None if own is None else (own.stretch, own.slowdown, own.turns_s), 3)
    if found is None:
        return None
    return BesideHalves(stretch=found[0], slowdown=found[1], turns_s=found[2], host_turns_s=0.0)


def _turns_seconds(device: torch.device) -> float:
    """Of a layer: what it takes that halves hand each other the turn."""
    turns = Turns(transfer_queue(device), lambda: lambda: None)

    def half() -> None:
        for _ in range(_NUM_TURNS // 2):
            turns.next()

    from_s = time.perf_counter()
    turns.run(half, half)
    return (time.perf_counter() - from_s) / _NUM_TURNS * _TURNS_OF_LAYER
