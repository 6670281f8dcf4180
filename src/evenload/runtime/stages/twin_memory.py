"""`TwinMemory`: the pieces of the model in memory that all ranks of a machine read (`sparse_memory`).

Every rank has one such memory with a place for everything that it may ever hold: of each shared piece its weights, and
the optimizer state of the whole piece, in which the rank's share lies where its elements are. So a piece that comes
needs no new place, a share that is cut anew leaves what it keeps where it is, and what another rank has lies at the
same offset in the memory of that rank.

    marks | weights of piece 0 | exp_avg of piece 0 | exp_avg_sq of piece 0 | weights of piece 1 | ...

A rank *marks* what it holds with the number of updates that it is of, before others read it, and readers check the
mark: a twin is of exactly this step, or it is not read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.errors import EvenloadError
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.stages.sparse_memory import PAGE_BYTES, OthersMemory, SparseMemory

WEIGHTS = "weights"
_ABSENT = -1


@dataclass(frozen=True, eq=False)
class Place:
    """Of one piece: where each of its parts begins, how many elements it has room for, and of which type."""

    capacity: int
    offsets: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]

    def offset(self, part: str, start: int) -> int:
        """Of an element of a part."""
        return self.offsets[part] + start * self.dtypes[part].itemsize


class TwinMemory:
    """Of one rank, and of those that it reads.

    Args:
        own: of this rank.
        others: by rank, of those of this machine with the same tensor-parallel place, itself included.
        places: by index, of the shared pieces.
    """

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
        """What this rank holds of a piece is of so many updates; None = it holds nothing that is to be read."""
        self._marks[piece] = _ABSENT if num_updates is None else num_updates

    def read(self, piece: int, part: str, source: int, start: int, into: Tensor, num_updates: int) -> None:
        """Copy elements from `start` on of a part of a piece from another rank.

        Raises:
            TwinError: what is there is not of so many updates.
        """
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
    """Places for pieces, one after the other, each part from a page of its own on; bytes of all.

    Args:
        parts: of every piece, by name; None = it is not shared.
        capacities: elements of every piece.
    """
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
    own, told = None, ""
    try:
        own = SparseMemory(num_bytes)
        mine: tuple[tuple[int, int, int] | None, str] = own.address, ""
    except OSError as error:
        mine = None, f"rank {mesh.rank}: {error}"
    addresses = told_by_all(mine, mesh)
    others: dict[int, OthersMemory] = {}
    try:
        for rank in _neighbourhood(mesh):
            address = addresses[rank][0]
            if address is not None:
                others[rank] = OthersMemory(address)
    except OSError as error:
        told = f"rank {mesh.rank}: {error}"
    reasons = [reason for _, reason in addresses if reason] or [one for one in told_by_all(told, mesh) if one]
    if reasons or own is None:
        return reasons[0]
    return TwinMemory(own, others, places, num_pieces)


def _neighbourhood(mesh: Mesh) -> list[int]:
    """Ranks of this machine with the same tensor-parallel place."""
    machine = range(mesh.rank // mesh.ranks_per_machine * mesh.ranks_per_machine, mesh.num_ranks)
    tp = mesh.layout.tp
    return [rank for rank in machine[: mesh.ranks_per_machine] if rank % tp == mesh.rank % tp]


def told_by_all(mine: object, mesh: Mesh) -> list:
    """In the order of ranks. Collective."""
    told: list = [None] * mesh.num_ranks
    with mesh.watch.waiting("the shared memory of the machine"):
        dist.all_gather_object(told, mine, group=mesh.control)
    return told


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
