"""`measured_copies`: what a switch costs on this machine, by doing what it does: ranks read each other's memory, all at
once and one alone, into memory that was touched and into fresh memory, and arrange their stages anew.

Rehearsed with cold caches and with ranks that are ready and train already on the same cores, as in a run; without both,
predictions were 1.6 to 1.9 times too short. Price: about two seconds at the start of a run.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from evenload.cost.coefficients import CopySpec
from evenload.runtime.comm.mesh import Mesh, most_of_ranks
from evenload.runtime.stages.live_pieces import LivePiece
from evenload.runtime.stages.twin_memory import WEIGHTS, SparseMemory, TwinMemory, touch

_REPEATS = 5
_REHEARSALS = 9
"""Milliseconds each, and how ranks come to their cores differs from one to the next."""
_LEAST_BYTES, _MOST_BYTES = 2**26, 2**28
"""A rank reads at least so much, if it has to read the same again, as less is noise; and not more, if its pieces let
it."""
_TRAINED_ON_S = 0.02
_COMPUTED = 128
"""Rows of a product that takes a tenth of a millisecond."""


def measured_copies(
    pieces: Sequence[LivePiece],
    twins: TwinMemory,
    mesh: Mesh,
    rehearsals: Mapping[int, Callable[[], object]],
    stand_ins: Sequence[LivePiece],
) -> CopySpec:
    """Measure before the first update, where some piece is shared; every rank returns the same. Collective.

    Args:
        rehearsals: what a switch does except moving, by the layers that a rank comes to hold.
        stand_ins: pieces as the model's layers are, which nobody holds; at least one.
    """
    reading = _Reading(pieces, twins, mesh)
    first = mesh.rank % mesh.ranks_per_machine == 0
    scratch = torch.zeros(_LEAST_BYTES, dtype=torch.uint8)

    def medians_s(repeats: int, *works: Callable[[], object], trains_on: bool = False) -> list[float]:
        """In turn, so that what disturbs one disturbs the others."""
        rounds = [[_slowest_s(work, mesh, scratch, trains_on=trains_on) for work in works] for _ in range(repeats)]
        return [statistics.median(one) for one in zip(*rounds, strict=True)]

    (machine_s,) = medians_s(_REPEATS, reading.run, trains_on=True)
    (alone_s,) = medians_s(_REPEATS, reading.run if first else lambda: None)
    (fresh_s,) = medians_s(_REPEATS, _touch_fresh)
    gained_s, left_s = medians_s(
        _REPEATS, lambda: [piece.gain() for piece in stand_ins], lambda: [piece.drop() for piece in stand_ins]
    )
    least, most = min(rehearsals), max(rehearsals)
    least_s, most_s = medians_s(_REHEARSALS, rehearsals[least], rehearsals[most], trains_on=True)
    layer_s = max(0.0, most_s - least_s) / max(1, most - least)
    read_alone = reading.num_bytes if first else 0
    read = torch.tensor([reading.num_bytes, read_alone, read_alone > 0, _LEAST_BYTES, first], dtype=torch.float64)
    dist.all_reduce(read, group=mesh.control)
    everyone_bytes, alone_bytes, reading_machines, fresh_bytes, machines = read.tolist()
    return CopySpec(
        rank_bytes_per_s=alone_bytes / reading_machines / alone_s,
        machine_bytes_per_s=everyone_bytes / reading_machines / machine_s,
        taken_bytes_per_s=fresh_bytes / machines / fresh_s,
        fixed_s=max(0.0, least_s - layer_s * least),
        layer_s=layer_s,
        gained_s=gained_s / len(stand_ins),
        left_s=left_s / len(stand_ins),
        num_ranks=mesh.num_ranks,
    )


class _Reading:
    """Reads the shared pieces that the next rank with any on this machine holds, round and round."""

    def __init__(self, pieces: Sequence[LivePiece], twins: TwinMemory, mesh: Mesh) -> None:
        held = [index for index, live in enumerate(pieces) if live.is_held and live.shared is not None]
        everyone: list[list[int]] = [[]] * mesh.num_ranks
        with mesh.watch.waiting("what ranks hold in shared memory"):
            dist.all_gather_object(everyone, held, group=mesh.control)
        holding = [rank for rank, there in enumerate(everyone) if any(twins.reaches(index, rank) for index in there)]
        self._source = min(holding, key=lambda rank: (rank - mesh.rank - 1) % mesh.num_ranks, default=mesh.rank)
        self._twins, self._into, self.num_bytes, self._rounds = twins, list[tuple[int, torch.Tensor]](), 0, 0
        for index in everyone[self._source]:
            size = pieces[index].piece.num_elements * pieces[index].piece.weight_bytes
            if not self._into or self.num_bytes + size <= _MOST_BYTES:
                # Memory as weights lie in: the system may give others larger pages, which take copies faster.
                self._into.append((index, SparseMemory(size).tensor(0, size, torch.uint8).zero_()))
                self.num_bytes += size
        if self.num_bytes:
            self._rounds = -(-_LEAST_BYTES // self.num_bytes)
            self.num_bytes *= self._rounds

    def run(self) -> None:
        for _ in range(self._rounds):
            for index, into in self._into:
                self._twins.read(index, WEIGHTS, self._source, 0, into, 0)


def _touch_fresh() -> None:
    touch(SparseMemory(_LEAST_BYTES).tensor(0, _LEAST_BYTES, torch.uint8))


def _slowest_s(work: Callable[[], object], mesh: Mesh, scratch: torch.Tensor, *, trains_on: bool = False) -> float:
    """From when all have come, with cold caches, until the last is done; `trains_on`: others compute meanwhile."""
    scratch.add_(1)
    dist.barrier(group=mesh.control)
    from_s = time.perf_counter()
    work()
    done_s = time.perf_counter()
    if trains_on:
        matrix = torch.ones(_COMPUTED, _COMPUTED)
        while time.perf_counter() < done_s + max(_TRAINED_ON_S, done_s - from_s):
            torch.mm(matrix, matrix)
    return most_of_ranks(done_s - from_s, mesh)
