"""TwinLayer (FlexPipe section 4): pieces of the model in memory that the ranks of a machine read.

**Memory.** Every rank has a file without a name (`SparseMemory`, Linux's `memfd_create`) with a place for everything
that it may ever hold, at the same offsets on all ranks:

    marks | weights of piece 0 | exp_avg of piece 0 | exp_avg_sq of piece 0 | weights of piece 1 | ...

Pages come with the first touch; `release` gives them back and keeps the place. Other processes open it through
`/proc/PID/fd` and read with `preadv`, one copy; pages are freed when the last process that has it open ends. A rank
*marks* what it offers with the number of updates that it is of, and readers wait for the mark. What is not shared, or
is on another machine, is sent (`arrival`).
"""

import mmap
import os
import select
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.errors import EvenloadError
from evenload.runtime.comm.mesh import Mesh

PAGE_BYTES = mmap.PAGESIZE
_RELEASED_AT_ONCE = 2**22
"""Bytes: releasing keeps Python's lock, and other threads train meanwhile."""

WEIGHTS = "weights"
_ABSENT = -1
_POLL_S = 0.001

Elements = tuple[int, int]
"""A range of a piece's elements, `[start, stop)`."""
Shards = Mapping[str, Tensor]
"""Of one piece on one rank, its weights, or its shard of every tensor of the optimizer, by name."""


class TwinError(EvenloadError):
    """Shared memory does not hold what it has to."""


class SparseMemory:
    """Maps memory of this process that others may read, with places of `num_bytes`. `OSError`: not possible here."""

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._descriptor = os.memfd_create("evenload")
        weakref.finalize(self, os.close, self._descriptor)  # pages stay while tensors, or other processes, have them
        os.ftruncate(self._descriptor, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)

    @property
    def address(self) -> tuple[int, int, int]:
        """Where other processes find it: process, descriptor, and the file's number as a proof."""
        return os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino

    def tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a place as a flat tensor, [num_elements]; takes no memory before it is touched."""
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=offset)

    def release(self, start: int, stop: int) -> None:
        """Give back the pages that lie wholly in these bytes, which are zeros afterwards."""
        start, stop = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        for first in range(start, stop, _RELEASED_AT_ONCE):
            self._map.madvise(mmap.MADV_REMOVE, first, min(_RELEASED_AT_ONCE, stop - first))


class OthersMemory:
    """Reads the `SparseMemory` of another process of this machine. `OSError`: not visible, or another's."""

    def __init__(self, address: tuple[int, int, int]) -> None:
        process, descriptor, number = address
        self._descriptor = os.open(Path("/proc", str(process), "fd", str(descriptor)), os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        if os.fstat(self._descriptor).st_ino != number:
            raise OSError(f"process {process} here is not the one that gave its number")
        self._process, self._end = process, select.poll()
        alive = os.pidfd_open(process)
        weakref.finalize(self, os.close, alive)
        self._end.register(alive, select.POLLIN)

    def read(self, offset: int, into: Tensor) -> None:
        """Copy what lies there into a contiguous tensor on the CPU. Other threads run meanwhile."""
        left = into.detach().view(torch.uint8).numpy().data
        while len(left):
            count = os.preadv(self._descriptor, [left], offset)
            if not count:
                raise OSError(f"the memory of another process ends at byte {offset}")
            left, offset = left[count:], offset + count

    def wait(self, seconds: float) -> None:
        """Wait so long; `DistNetworkError` as soon as the other process ends."""
        if self._end.poll(1e3 * seconds):
            raise dist.DistNetworkError(f"process {self._process} has ended")


def touch(tensor: Tensor) -> None:
    """Take the memory of a contiguous tensor on the CPU; its values are lost. Other threads run meanwhile."""
    if tensor.numel():
        flat = tensor.view(torch.uint8)
        flat[::PAGE_BYTES].zero_()
        flat[-1:].zero_()  # a page that begins behind the last step


@dataclass(frozen=True, eq=False)
class PieceMemory:
    """The places of one shared piece, the same on all ranks: of `capacity` elements of each part, from these byte
    offsets. Tensors are of this rank's memory (`own`); writing to them takes memory, `release` gives it back."""

    own: SparseMemory = field(repr=False)
    capacity: int
    offsets: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]

    def offset(self, part: str, start: int) -> int:
        return self.offsets[part] + start * self.dtypes[part].itemsize

    def tensor(self, part: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements of a part, [stop - start]; default: all of its place."""
        count = (self.capacity if stop is None else stop) - start
        return self.own.tensor(self.offset(part, start), count, self.dtypes[part])

    def release(self, part: str, start: int = 0, stop: int | None = None) -> None:
        stop = self.capacity if stop is None else stop
        self.own.release(self.offset(part, start), self.offset(part, stop))


Parts = Sequence[Mapping[str, torch.dtype] | None]  # of every piece, by name; None = it is not shared


def place_pieces(parts: Parts, capacities: Sequence[int]) -> tuple[SparseMemory, dict[int, PieceMemory]]:
    """Make memory with places for parts of pieces of so many elements."""
    end = _pages(len(parts) * torch.int64.itemsize)
    offsets: dict[int, dict[str, int]] = {}
    for index, (dtypes, capacity) in enumerate(zip(parts, capacities, strict=True)):
        for name, dtype in (dtypes or {}).items():
            offsets.setdefault(index, {})[name] = end
            end += _pages(capacity * dtype.itemsize)
    own = SparseMemory(end)
    return own, {index: PieceMemory(own, capacities[index], at, parts[index] or {}) for index, at in offsets.items()}


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class TwinMemory:
    """Holds one rank's memory, and reads that of `others`: of this machine, with the same tensor-parallel place.
    `pieces` are the shared ones by index; `patience_s`: how long a reader waits for a mark."""

    def __init__(
        self,
        own: SparseMemory,
        others: Mapping[int, OthersMemory],
        pieces: Mapping[int, PieceMemory],
        num_pieces: int,
        patience_s: float,
    ) -> None:
        self.pieces, self._others, self._patience_s = pieces, others, patience_s
        self._marks = own.tensor(0, num_pieces, torch.int64)
        self._marks.fill_(_ABSENT)

    def reaches(self, piece: int, rank: int) -> bool:
        """Say whether what a rank has of a piece can be read."""
        return piece in self.pieces and rank in self._others

    def mark(self, piece: int, num_updates: int | None) -> None:
        """Mark what this rank holds of a piece as of so many updates; None = nothing is to be read."""
        self._marks[piece] = _ABSENT if num_updates is None else num_updates

    def read(self, piece: int, part: str, source: int, start: int, into: Tensor, num_updates: int) -> None:
        """Copy elements from `start` on of a rank's part, once it is marked as of so many updates. `TwinError` where it
        is of more; `DistNetworkError` where the rank is lost."""
        other, mark, until_s = self._others[source], torch.empty(1, dtype=torch.int64), None
        while True:
            other.read(piece * mark.itemsize, mark)
            if (found := int(mark)) == num_updates:
                return other.read(self.pieces[piece].offset(part, start), into)
            held = "nothing" if found == _ABSENT else f"its state after {found} updates"
            what = f"rank {source} was to have {part} of piece {piece} after {num_updates} updates in shared memory"
            if found > num_updates:
                raise TwinError(
                    f"{what}, and has {held}: ranks disagree about the layout that ran (a defect; plan.twin_bytes=0 "
                    "does without)"
                )
            now_s = time.monotonic()
            until_s = until_s or now_s + self._patience_s
            if now_s > until_s:
                raise dist.DistNetworkError(f"timed out: {what}, and has {held}")
            other.wait(_POLL_S)


def open_twins(parts: Parts, capacities: Sequence[int], mesh: Mesh, patience_s: float) -> TwinMemory | str:
    """Make this rank's memory and open those of its machine; the reason where some rank cannot. Arguments as of
    `place_pieces` and `TwinMemory`. Collective."""
    others: dict[int, OthersMemory] = {}
    own, places, address, reason = None, {}, None, ""
    try:
        own, places = place_pieces(parts, capacities)
        address = own.address
    except OSError as error:
        reason = f"rank {mesh.rank}: {error}"
    addresses = gather_from_all(address, mesh)
    first, tp = mesh.rank // mesh.ranks_per_machine * mesh.ranks_per_machine, mesh.layout.tp
    try:
        for rank in range(first, min(first + mesh.ranks_per_machine, mesh.num_ranks)):
            if rank % tp == mesh.rank % tp and addresses[rank] is not None:
                others[rank] = OthersMemory(addresses[rank])
    except OSError as error:
        reason = reason or f"rank {mesh.rank}: {error}"
    reasons = [one for one in gather_from_all(reason, mesh) if one]
    return reasons[0] if own is None or reasons else TwinMemory(own, others, places, len(parts), patience_s)


def gather_from_all(mine: object, mesh: Mesh) -> list:
    """Return every rank's object, in the order of ranks. Collective."""
    objects: list = [None] * mesh.num_ranks
    with mesh.watch.waiting("the shared memory of the machine"):
        dist.all_gather_object(objects, mine, group=mesh.control)
    return objects
