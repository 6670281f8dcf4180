"""`TwinMemory`: the pieces of the model in memory that all ranks of a machine read.

Every rank has one, with a place for everything that it may ever hold, at the same offsets on all ranks:

    marks | weights of piece 0 | exp_avg of piece 0 | exp_avg_sq of piece 0 | weights of piece 1 | ...

A rank *marks* what it holds with the number of updates that it is of, and readers check the mark: a twin is of exactly
this step, or it is not read.

The memory (`SparseMemory`) is a file without a name (Linux's `memfd_create`), mapped by its process: pages come with
the first touch, `release` gives them back and keeps the place. Other processes open it through `/proc/PID/fd` and read
with `preadv`, one copy. Nothing is left behind: the kernel frees the pages when the last process that has it open has
ended, however it ended. The size of `/dev/shm` does not matter.
"""

import mmap
import os
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


class SparseMemory:
    """Maps memory of this process that others may read, with places of `num_bytes`. `OSError`: not possible here."""

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._descriptor = os.memfd_create("evenload")
        os.ftruncate(self._descriptor, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)  # the pages stay as long as tensors, or other processes, have them

    @property
    def address(self) -> tuple[int, int, int]:
        """By which other processes of the machine find it: process, descriptor, and the file's number as a proof."""
        return os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino

    def tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A place as a flat tensor, [num_elements]; takes no memory before it is touched."""
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=offset)

    def release(self, start: int, stop: int) -> None:
        """Give back the pages that lie wholly in these bytes, which are zeros afterwards."""
        start, stop = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        for first in range(start, stop, _RELEASED_AT_ONCE):
            self._map.madvise(mmap.MADV_REMOVE, first, min(_RELEASED_AT_ONCE, stop - first))


class OthersMemory:
    """The `SparseMemory` of another process of this machine, to read. `OSError`: not visible, or another's."""

    def __init__(self, address: tuple[int, int, int]) -> None:
        process, descriptor, number = address
        self._descriptor = os.open(Path("/proc", str(process), "fd", str(descriptor)), os.O_RDONLY)
        if os.fstat(self._descriptor).st_ino != number:
            raise OSError(f"process {process} here is not the one that gave its number")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, offset: int, into: Tensor) -> None:
        """Copy what lies there into a contiguous tensor on the CPU. Other threads run meanwhile."""
        left = into.detach().view(torch.uint8).numpy().data
        while len(left):
            count = os.preadv(self._descriptor, [left], offset)
            if not count:
                raise OSError(f"the memory of another process ends at byte {offset}")
            left, offset = left[count:], offset + count


def touch(tensor: Tensor) -> None:
    """Take the memory of a contiguous tensor on the CPU; its values are lost. Other threads run meanwhile."""
    if tensor.numel():
        flat = tensor.view(torch.uint8)
        flat[::PAGE_BYTES].zero_()
        flat[-1:].zero_()  # a page that begins behind the last step


WEIGHTS = "weights"
_ABSENT = -1


@dataclass(frozen=True, eq=False)
class Place:
    """Says where each part of a piece begins, how many elements it has room for, and of which type."""

    capacity: int
    offsets: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]

    def offset(self, part: str, start: int) -> int:
        """Return the offset of an element of a part."""
        return self.offsets[part] + start * self.dtypes[part].itemsize


class TwinMemory:
    """Holds one rank's memory, and reads that of `others`: of this machine, with the same tensor-parallel place."""

    def __init__(
        self, own: SparseMemory, others: Mapping[int, OthersMemory], places: Mapping[int, Place], num_pieces: int
    ) -> None:
        self._own, self._others, self._places = own, others, places
        self._marks = own.tensor(0, num_pieces, torch.int64)
        self._marks.fill_(_ABSENT)

    def reaches(self, piece: int, rank: int) -> bool:
        """Whether what a rank has of a piece can be read."""
        return piece in self._places and rank in self._others

    def of_piece(self, piece: int) -> "PieceMemory | None":
        """This rank's memory for a piece; None = it is not shared."""
        place = self._places.get(piece)
        return None if place is None else PieceMemory(self._own, place)

    def mark(self, piece: int, num_updates: int | None) -> None:
        """Mark what this rank holds of a piece as of so many updates; None = nothing is to be read."""
        self._marks[piece] = _ABSENT if num_updates is None else num_updates

    def read(self, piece: int, part: str, source: int, start: int, into: Tensor, num_updates: int) -> None:
        """Copy elements from `start` on of a rank's part. `TwinError` where it is not of so many updates."""
        other, mark = self._others[source], torch.empty(1, dtype=torch.int64)
        other.read(piece * mark.itemsize, mark)
        if int(mark) != num_updates:
            found = "nothing" if int(mark) == _ABSENT else f"its state after {int(mark)} updates"
            raise TwinError(
                f"rank {source} was to have {part} of piece {piece} after {num_updates} updates in shared memory, and "
                f"has {found}: ranks disagree about the layout that ran (a defect; plan.twin_bytes=0 does without)"
            )
        other.read(self._places[piece].offset(part, start), into)


class TwinError(EvenloadError):
    """Shared memory does not hold what it has to."""


@dataclass(frozen=True, eq=False)
class PieceMemory:
    """One rank's memory of one shared piece. Reading and writing tensors takes memory, `release` gives it back."""

    own: SparseMemory = field(repr=False)
    place: Place

    def tensor(self, part: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements of a part, [stop - start]; default: all there is room for."""
        count = (self.place.capacity if stop is None else stop) - start
        return self.own.tensor(self.place.offset(part, start), count, self.place.dtypes[part])

    def release(self, part: str, start: int = 0, stop: int | None = None) -> None:
        """Give back the memory of elements of a part."""
        until = self.place.capacity if stop is None else stop
        self.own.release(self.place.offset(part, start), self.place.offset(part, until))


def placed(
    parts: Sequence[Mapping[str, torch.dtype] | None], capacities: Sequence[int]
) -> tuple[dict[int, Place], int]:
    """Find places for pieces of so many elements, None of `parts` = not shared; return them and all bytes."""
    end = _pages(len(parts) * torch.int64.itemsize)
    places = {}
    for index, (dtypes, capacity) in enumerate(zip(parts, capacities, strict=True)):
        offsets = {}
        for name, dtype in ({} if dtypes is None else dtypes).items():
            offsets[name] = end
            end += _pages(capacity * dtype.itemsize)
        if dtypes is not None:
            places[index] = Place(capacity, offsets, dtypes)
    return places, end


def open_twins(places: Mapping[int, Place], num_bytes: int, num_pieces: int, mesh: Mesh) -> TwinMemory | str:
    """Make this rank's memory and open those of its machine; why no rank can, where one cannot. Collective."""
    own, reason = None, ""
    try:
        own = SparseMemory(num_bytes)
        mine: tuple[tuple[int, int, int] | None, str] = own.address, ""
    except OSError as error:
        mine = None, f"rank {mesh.rank}: {error}"
    addresses = gather_from_all(mine, mesh)
    others: dict[int, OthersMemory] = {}
    try:
        for rank in _neighbourhood(mesh):
            address = addresses[rank][0]
            if address is not None:
                others[rank] = OthersMemory(address)
    except OSError as error:
        reason = f"rank {mesh.rank}: {error}"
    reasons = [one for _, one in addresses if one] or [one for one in gather_from_all(reason, mesh) if one]
    if reasons or own is None:
        return reasons[0]
    return TwinMemory(own, others, places, num_pieces)


def _neighbourhood(mesh: Mesh) -> list[int]:
    machine = range(mesh.rank // mesh.ranks_per_machine * mesh.ranks_per_machine, mesh.num_ranks)
    tp = mesh.layout.tp
    return [rank for rank in machine[: mesh.ranks_per_machine] if rank % tp == mesh.rank % tp]


def gather_from_all(mine: object, mesh: Mesh) -> list:
    """Return every rank's object, in the order of ranks. Collective."""
    objects: list = [None] * mesh.num_ranks
    with mesh.watch.waiting("the shared memory of the machine"):
        dist.all_gather_object(objects, mine, group=mesh.control)
    return objects


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
