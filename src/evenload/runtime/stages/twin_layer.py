"""TwinLayer (FlexPipe section 4): pieces of the model in memory that the ranks of a machine read.

**Memory.** Every rank has a file without a name (`SparseMemory`, Linux's `memfd_create`) with a place for everything
that it may ever hold, at the same offsets on all ranks:

    marks | weights of piece 0 | exp_avg of piece 0 | exp_avg_sq of piece 0 | weights of piece 1 | ...

Pages come with the first touch; `release` gives them back and keeps the place. Other processes open it through
`/proc/PID/fd` and read with `preadv`, one copy; pages are freed when the last process that has it open ends. A rank
*marks* what it offers with the number of updates that it is of, and readers wait for the mark. What is not shared, or
is on another machine, is sent (`arrival`). GPUs have the same `Transport` through host memory (`host_twins`).
"""

import mmap
import os
import select
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.errors import EvenloadError
from evenload.planning.layouts.moves import Move
from evenload.runtime.comm.mesh import Mesh, gather_from_all
from evenload.runtime.replay.host_copies import PAGE_BYTES, page_lock
from evenload.types.text import format_bytes

_RELEASED_AT_ONCE = 2**22
"""Bytes: releasing keeps Python's lock, and other threads train meanwhile."""

WEIGHTS = "weights"
ABSENT = -1
_POLL_MS = 1

Address = tuple[int, int, int]
"""Where other processes find memory: process, descriptor, and the file's number as a proof."""
Elements = tuple[int, int]
"""A range of a piece's elements, `[start, stop)`."""
Shards = Mapping[str, Tensor]
"""Of one piece on one rank, its weights, or its shard of every tensor of the optimizer, by name."""


class TwinError(EvenloadError):
    """Shared memory does not hold what it has to."""


class SparseMemory:
    """Maps memory of this process, or of one `at` this address, that others may read, with places of `num_bytes`.
    `OSError`: not possible here."""

    def __init__(self, num_bytes: int, at: Address | None = None) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._descriptor = os.memfd_create("evenload") if at is None else open_memory(at, os.O_RDWR)
        weakref.finalize(self, os.close, self._descriptor)  # pages stay while tensors, or other processes, have them
        if at is None:
            os.ftruncate(self._descriptor, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)

    @property
    def address(self) -> Address:
        return os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino

    def tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a place as a flat tensor, [num_elements]; takes no memory before it is touched."""
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=offset)

    def page_lock(self) -> None:
        """Page-lock all of it for as long as the process lives. `OSError` where CUDA does not."""
        self._map.madvise(mmap.MADV_DONTFORK)
        whole = self.tensor(0, len(self._map), torch.uint8)
        if code := page_lock(whole):
            raise OSError(f"CUDA did not page-lock {format_bytes(len(whole))} (cudaHostRegister: CUDA error {code})")
        cuda: Any = torch.cuda.cudart()
        # Not at the end of the process, as in `host_copies`.
        weakref.finalize(self, cuda.cudaHostUnregister, whole.data_ptr()).atexit = False  # type: ignore[attr-defined]

    def release(self, start: int, stop: int) -> None:
        """Give back the pages that lie wholly in these bytes, which are zeros afterwards."""
        start, stop = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        for first in range(start, stop, _RELEASED_AT_ONCE):
            self._map.madvise(mmap.MADV_REMOVE, first, min(_RELEASED_AT_ONCE, stop - first))


def open_memory(address: Address, flags: int) -> int:
    """Open the memory of a process of this machine, itself included. `OSError`: not visible, or another's."""
    process, descriptor, number = address
    result = os.open(Path("/proc", str(process), "fd", str(descriptor)), flags)
    if os.fstat(result).st_ino != number:
        os.close(result)
        raise OSError(f"process {process} here is not the one that gave its number")
    return result


class OtherProcess:
    """Waits for what another process of this machine does, as long as it lives. `OSError`: not visible."""

    def __init__(self, process: int) -> None:
        self._process, self._end = process, select.poll()
        alive = os.pidfd_open(process)
        weakref.finalize(self, os.close, alive)
        self._end.register(alive, select.POLLIN)

    def await_mark(self, found: Callable[[], int], num_updates: int, patience_s: float, what: str) -> None:
        """Wait until a mark is of so many updates. `TwinError` where it is of more; `DistNetworkError` as soon as the
        process ends, or after `patience_s`."""
        from_s = time.monotonic()
        while (mark := found()) != num_updates:
            told = f"{what} after {num_updates} updates, and has "
            told += "nothing" if mark == ABSENT else f"its state after {mark} updates"
            if mark > num_updates:
                raise TwinError(
                    f"{told}: ranks disagree about the layout that ran (a defect; plan.twin_bytes=0 does without)"
                )
            if time.monotonic() > from_s + patience_s:
                raise dist.DistNetworkError(f"timed out: {told}")
            if self._end.poll(_POLL_MS):
                raise dist.DistNetworkError(f"process {self._process} has ended")


class OthersMemory(OtherProcess):
    """Reads the `SparseMemory` of another process of this machine. `OSError`: not visible, or another's."""

    def __init__(self, address: Address) -> None:
        self._descriptor = open_memory(address, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        super().__init__(address[0])

    def read(self, offset: int, into: Tensor) -> None:
        """Copy what lies there into a contiguous tensor on the CPU. Other threads run meanwhile."""
        left = into.detach().view(torch.uint8).numpy().data
        while len(left):
            count = os.preadv(self._descriptor, [left], offset)
            if not count:
                raise OSError(f"the memory of another process ends at byte {offset}")
            left, offset = left[count:], offset + count


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


def place_pieces(
    parts: Parts, capacities: Sequence[int], num_marks: int, at: Address | None = None
) -> tuple[SparseMemory, dict[int, PieceMemory]]:
    """Make memory, or open that of another process, with places for marks and parts of pieces of so many elements."""
    end = _pages(num_marks * torch.int64.itemsize)
    offsets: dict[int, dict[str, int]] = {}
    for index, (dtypes, capacity) in enumerate(zip(parts, capacities, strict=True)):
        for name, dtype in (dtypes or {}).items():
            offsets.setdefault(index, {})[name] = end
            end += _pages(capacity * dtype.itemsize)
    own = SparseMemory(end, at)
    if at is None:
        # Before others can open it: zeros would say that all pieces are there, as a run begins with them.
        own.tensor(0, num_marks, torch.int64).fill_(ABSENT)
    return own, {index: PieceMemory(own, capacities[index], at, parts[index] or {}) for index, at in offsets.items()}


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


MovedParts = Callable[[Move], Shards]
"""What one rank gives, or gets, of a move, by name."""
UpdatesOf = Callable[[int], int]
"""The updates that a piece is of."""


class Transport(ABC):
    """Moves `pieces`, by index, between ranks of a machine with the same tensor-parallel place."""

    pieces: Mapping[int, PieceMemory]

    @abstractmethod
    def reaches(self, piece: int, rank: int) -> bool:
        """Say whether a piece can be read from a rank."""

    @abstractmethod
    def offer(self, moves: Sequence[Move], parts: MovedParts, updates: UpdatesOf) -> None:
        """Let other ranks read what these moves take from here, when it is there. Does not wait."""

    @abstractmethod
    def fetch(self, move: Move, parts: Shards, num_updates: int) -> None:
        """Copy what a move brings here, once it is offered as of so many updates. Errors as of `await_mark`."""

    @abstractmethod
    def withdraw(self, lost: Collection[int]) -> None:
        """Offer no more of pieces that this rank lost, when all ranks have everything."""


class TwinMemory(Transport):
    """Holds one rank's memory, in which its pieces live, and reads that of `others`. `patience_s`: how long a reader
    waits for a mark."""

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

    def reaches(self, piece: int, rank: int) -> bool:
        return piece in self.pieces and rank in self._others

    def mark(self, piece: int, num_updates: int | None) -> None:
        """Mark what this rank holds of a piece as of so many updates; None = nothing is to be read."""
        self._marks[piece] = ABSENT if num_updates is None else num_updates

    def read(self, piece: int, part: str, source: int, start: int, into: Tensor, num_updates: int) -> None:
        """Copy elements from `start` on of a rank's part, once it is marked as of so many updates. Errors as of
        `await_mark`."""
        other, mark = self._others[source], torch.empty(1, dtype=torch.int64)

        def found() -> int:
            other.read(piece * mark.itemsize, mark)
            return int(mark)

        what = f"rank {source} was to have {part} of piece {piece} in shared memory"
        other.await_mark(found, num_updates, self._patience_s, what)
        other.read(self.pieces[piece].offset(part, start), into)

    def offer(self, moves: Sequence[Move], parts: MovedParts, updates: UpdatesOf) -> None:
        for move in moves:
            self.mark(move.piece, updates(move.piece))

    def fetch(self, move: Move, parts: Shards, num_updates: int) -> None:
        for name, part in parts.items():
            self.read(move.piece, name, move.source, move.start, part, num_updates)

    def withdraw(self, lost: Collection[int]) -> None:
        for index in lost:
            self.mark(index, None)


def open_twins(parts: Parts, capacities: Sequence[int], mesh: Mesh, patience_s: float) -> TwinMemory | str:
    """Make this rank's memory and open those of its machine; the reason where some rank cannot. Arguments as of
    `place_pieces` and `TwinMemory`. Collective."""
    others: dict[int, OthersMemory] = {}
    own, places, address, reason = None, {}, None, ""
    try:
        own, places = place_pieces(parts, capacities, len(parts))
        address = own.address
    except OSError as error:
        reason = f"rank {mesh.rank}: {error}"
    addresses = gather_from_all(address, mesh, "the shared memory of the machine")
    try:
        for rank in ranks_here(mesh):
            if (there := addresses[rank]) is not None:
                others[rank] = OthersMemory(there)
    except OSError as error:
        reason = reason or f"rank {mesh.rank}: {error}"
    reasons = [one for one in gather_from_all(reason, mesh, "the shared memory of the machine") if one]
    return reasons[0] if own is None or reasons else TwinMemory(own, others, places, len(parts), patience_s)


def ranks_here(mesh: Mesh) -> list[int]:
    """Return the ranks of this machine with this one's tensor-parallel place."""
    first, tp = mesh.rank // mesh.ranks_per_machine * mesh.ranks_per_machine, mesh.layout.tp
    return [
        rank for rank in range(mesh.num_ranks)[first : first + mesh.ranks_per_machine] if (rank - mesh.rank) % tp == 0
    ]
