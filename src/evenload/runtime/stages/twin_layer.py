"""TwinLayer (FlexPipe section 4): pieces of the model in memory that the ranks of a machine read, and how they come to
the ranks that lack them in a new layout.

**Memory.** Every rank has a file without a name (`SparseMemory`, Linux's `memfd_create`) with a place for everything
that it may ever hold, at the same offsets on all ranks:

    marks | weights of piece 0 | exp_avg of piece 0 | exp_avg_sq of piece 0 | weights of piece 1 | ...

Pages come with the first touch; `release` gives them back and keeps the place. Other processes open it through
`/proc/PID/fd` and read with `preadv`, one copy; pages are freed when the last process that has it open ends. A rank
*marks* what it holds with the number of updates that it is of, and readers check the mark. What is not shared, or is on
another machine, is sent.

**Weights** (`TwinLayer.bring_weights`), before the first step of the layout, straight to where they stay:

    marks -> barrier -> sends and receives are posted -> reads -> waits -> (several machines: barrier -> relayed reads)

**Optimizer state** (`StateArrival`), in a thread while the step already runs in the new layout; only its update waits
for it. On a GPU it is queued on a stream of its own, behind what made the old state.

    all have their weights (barrier) -> free old weights -> state -> all have theirs (barrier) -> free old state
"""

import copy
import mmap
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenload.attention.range_attention import work_dtype
from evenload.errors import EvenloadError
from evenload.planning.layouts.moves import Move, Moves, Piece, state_share
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.comm.watch import Background
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.optim.data_parallel import (
    BufferGroup,
    FlatBuffer,
    add_gradients_of_autograd,
    attach,
    padded_size,
    tied_names,
    unit_groups,
)
from evenload.runtime.optim.optimizer import MASTER

PAGE_BYTES = mmap.PAGESIZE
_RELEASED_AT_ONCE = 2**22
"""Bytes: releasing keeps Python's lock, and other threads train meanwhile."""

WEIGHTS = "weights"
_ABSENT = -1

Elements = tuple[int, int]
"""A range of a piece's elements, `[start, stop)`."""
Shards = Mapping[str, Tensor]
"""Of one piece on one rank, its shard of every tensor of the optimizer, by name."""


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
    `pieces` are the shared ones by index."""

    def __init__(
        self, own: SparseMemory, others: Mapping[int, OthersMemory], pieces: Mapping[int, PieceMemory], num_pieces: int
    ) -> None:
        self.pieces, self._others = pieces, others
        self._marks = own.tensor(0, num_pieces, torch.int64)
        self._marks.fill_(_ABSENT)

    def reaches(self, piece: int, rank: int) -> bool:
        """Say whether what a rank has of a piece can be read."""
        return piece in self.pieces and rank in self._others

    def mark(self, piece: int, num_updates: int | None) -> None:
        """Mark what this rank holds of a piece as of so many updates; None = nothing is to be read."""
        self._marks[piece] = _ABSENT if num_updates is None else num_updates

    def read(self, piece: int, part: str, source: int, start: int, into: Tensor, num_updates: int) -> None:
        """Copy elements from `start` on of a rank's part. `TwinError` where it is not of so many updates."""
        other, mark = self._others[source], torch.empty(1, dtype=torch.int64)
        other.read(piece * mark.itemsize, mark)
        if int(mark) != num_updates:
            held = "nothing" if int(mark) == _ABSENT else f"its state after {int(mark)} updates"
            raise TwinError(
                f"rank {source} was to have {part} of piece {piece} after {num_updates} updates in shared memory, and "
                f"has {held}: ranks disagree about the layout that ran (a defect; plan.twin_bytes=0 does without)"
            )
        other.read(self.pieces[piece].offset(part, start), into)


def open_twins(parts: Parts, capacities: Sequence[int], mesh: Mesh) -> TwinMemory | str:
    """Make this rank's memory and open those of its machine; the reason where some rank cannot. Arguments as of
    `place_pieces`. Collective."""
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
    return reasons[0] if own is None or reasons else TwinMemory(own, others, places, len(parts))


def gather_from_all(mine: object, mesh: Mesh) -> list:
    """Return every rank's object, in the order of ranks. Collective."""
    objects: list = [None] * mesh.num_ranks
    with mesh.watch.waiting("the shared memory of the machine"):
        dist.all_gather_object(objects, mine, group=mesh.control)
    return objects


class LivePiece:
    """A piece of the model (`plan.layouts.moves.Piece`) on one rank, flat in memory while it is held.

    Parameters are the same objects for the whole run; those of a piece that is not held have no elements. Buffers fit
    every number of data-parallel ranks of the run's layouts, so a piece that stays is cut anew without being moved.

    Args:
        group: of a trained piece; None = it is frozen.
        buffer: of a trained piece that is held, as `flatten_units` made it for all `data_sizes`.
    """

    def __init__(
        self,
        unit: int,
        parameters: Sequence[nn.Parameter],
        group: BufferGroup | None,
        buffer: FlatBuffer | None,
        *,
        at_both_ends: bool,
        data_sizes: Sequence[int],
        device: torch.device,
        is_held: bool,
    ) -> None:
        self.parameters, self.is_held, self.buffer = tuple(parameters), is_held, buffer
        self.shared: PieceMemory | None = None
        self._device, self._dtype, self._work = device, parameters[0].dtype, work_dtype(parameters[0])
        self._shapes = [parameter.shape for parameter in parameters]
        self._values: Tensor | None = None
        self._grads: Tensor | None = None
        self.state_names: tuple[str, ...] = ()
        if group is not None:
            self.state_names = ("exp_avg", "exp_avg_sq", *([MASTER] if self._work != self._dtype else []))
        self.piece = Piece(
            unit=unit,
            num_elements=sum(shape.numel() for shape in self._shapes),
            weight_bytes=self._dtype.itemsize,
            state_bytes=len(self.state_names) * self._work.itemsize,
            at_both_ends=at_both_ends,
        )
        self.capacity = padded_size(self.piece.num_elements, *(data_sizes if self.is_trained else (1,)))
        """Elements of the memory of its weights."""
        if not is_held:
            for parameter in parameters if self.is_trained else ():
                add_gradients_of_autograd(parameter)
            self.drop()
        elif buffer is not None:
            both = buffer.values, buffer.grads
            self._values, self._grads = (flat.as_strided((self.capacity,), (1,), 0) for flat in both)
        else:
            self._attach(self._flat_weights(), None)

    @property
    def is_trained(self) -> bool:
        return bool(self.state_names)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {WEIGHTS: self._dtype} | dict.fromkeys(self.state_names, self._work)

    @property
    def weights(self) -> Tensor:
        """Its weights, flat and in place, [num_elements], of a piece that is held."""
        assert self._values is not None
        return self._values[: self.piece.num_elements]

    def updates_after(self, num_updates: int) -> int:
        """Return the updates that its weights are of after so many: frozen ones never see any."""
        return num_updates if self.is_trained else 0

    def share_in(self, mesh: Mesh) -> Elements:
        """Return the elements whose optimizer state this rank owns in a layout in which it holds the piece."""
        return state_share(mesh.layout, self.piece, mesh.pp_rank, mesh.data_rank)

    def stand_in(self) -> "LivePiece":
        """Return a piece like this one that nobody holds, to measure what one costs that comes and goes."""
        like = copy.copy(self)
        like.parameters = tuple(nn.Parameter(one.detach(), one.requires_grad) for one in self.parameters)
        like.shared = None
        like.drop()
        return like

    def share(self, shared: PieceMemory) -> None:
        """Move its weights to shared memory, before the run begins."""
        self.shared = shared
        if not self.is_held:
            return
        values = shared.tensor(WEIGHTS)
        values[: self.piece.num_elements] = self._flat_weights()
        self._attach(values, self._grads)
        if self.buffer is not None:
            self.buffer.values = values[: self.buffer.values.numel()]  # in place: the optimizer has it, too

    def gain(self) -> None:
        """Take memory; values are to be received, those of padding are zeros."""
        assert not self.is_held
        self.is_held = True
        values = self._empty(self._dtype) if self.shared is None else self.shared.tensor(WEIGHTS)
        grads = self._empty(self._work) if self.is_trained else None
        for flat in (values, grads):
            if flat is not None:
                flat[self.piece.num_elements :].zero_()
        self._attach(values, grads)

    def drop(self) -> object:
        """Hold the piece no more: private memory goes with what is returned, shared memory when it is released."""
        kept = self._values, self._grads
        for parameter in self.parameters:
            parameter.data = torch.empty(0, dtype=self._dtype, device=self._device)
            parameter.main_grad = None  # type: ignore[attr-defined]
        self.is_held, self.buffer, self._values, self._grads = False, None, None, None
        return kept

    def cut(self, group: BufferGroup, data_size: int) -> FlatBuffer:
        """Return its buffer in a layout, in which it may have another name and other holders."""
        assert self._values is not None
        assert self._grads is not None
        self.buffer = group.in_memory(self._values, self._grads, data_size)
        return self.buffer

    def _flat_weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.capacity, dtype=dtype, device=self._device)

    def _attach(self, values: Tensor, grads: Tensor | None) -> None:
        self._values, self._grads = values, grads
        attach(self.parameters, self._shapes, values, grads)


def live_pieces(
    whole: StageModel,
    held: Collection[int],
    buffers: Sequence[FlatBuffer],
    data_sizes: Sequence[int],
    device: torch.device,
) -> list[LivePiece]:
    """Return all pieces of the model in the order of units, the same on all ranks. Those whose parameters are `held`,
    by id, have these buffers where they are trained."""
    tied = tied_names(whole.structure)
    buffer_of = {id(buffer.parameters[0]): buffer for buffer in buffers}
    pieces = []
    for unit, named in enumerate(whole.named_units()):
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        groups: list[tuple[Sequence[nn.Parameter], BufferGroup | None]] = [
            (group.parameters, group) for group in unit_groups(trained, tied, unit)
        ]
        for is_matrix in (True, False):
            frozen = [p for name, p in named if not p.requires_grad and (name in tied) == is_matrix]
            groups += [(frozen, None)] if frozen else []
        pieces += [
            LivePiece(
                unit,
                parameters,
                group,
                buffer_of.get(id(parameters[0])),
                at_both_ends=bool(tied) and parameters[0] is whole.embedding.weight,
                data_sizes=data_sizes,
                device=device,
                is_held=id(parameters[0]) in held,
            )
            for parameters, group in groups
        ]
    for module in whole.modules:
        module.to(device)  # what is no parameter: parameters without values are there already
    return pieces


class TwinLayer:
    """All pieces of the model on one rank, in order, and what its machine shares of them: `twins`, None = nothing."""

    def __init__(self, pieces: Sequence[LivePiece], twins: TwinMemory | None) -> None:
        self.pieces, self.twins = pieces, twins

    def mark_held(self, num_updates: int, but: Collection[int] = ()) -> None:
        """Mark what this rank holds as of so many updates, without some pieces, by index; and nothing else."""
        if self.twins is None:
            return
        for index, live in enumerate(self.pieces):
            self.twins.mark(index, live.updates_after(num_updates) if live.is_held and index not in but else None)

    def wait_for_all(self, mesh: Mesh, what: str, group: dist.ProcessGroup | None) -> None:
        """Wait until all ranks have read, or marked, what they had to, where they share memory. Collective."""
        if self.twins is not None:
            with mesh.watch.waiting(what):
                dist.barrier(group=group)

    def bring_weights(self, moves: Moves, mesh: Mesh, num_updates: int) -> int:
        """Bring weights into place; return the bytes received. Collective. `RankLostError`: a rank is lost."""
        what, received_bytes = f"weights of layout {mesh.layout.describe()}", 0
        all_moves = (*moves.weights, *moves.relayed)
        # What comes to a machine once is relayed there, when it has come.
        phases = [(moves.weights, all_moves)]
        phases += [(moves.relayed, moves.relayed)] if mesh.num_ranks > mesh.ranks_per_machine else []
        for now, without_values in phases:
            self.mark_held(num_updates, {move.piece for move in without_values if move.target == mesh.rank})
            self.wait_for_all(mesh, what, mesh.control)
            received_bytes += self.transfer(now, mesh, num_updates, what, self._weights, self._weights)
        self.mark_held(num_updates)
        return received_bytes

    def _weights(self, move: Move) -> Shards:
        return {WEIGHTS: self.pieces[move.piece].weights}

    def transfer(
        self,
        moves: Sequence[Move],
        mesh: Mesh,
        num_updates: int,
        what: str,
        incoming: Callable[[Move], Shards],
        outgoing: Callable[[Move], Shards],
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """Make this rank's moves, by reading where both ends share memory, else by sending; return the bytes received.
        Collective."""
        received_bytes, ops, reads = 0, list[dist.P2POp](), list[tuple[Move, Shards]]()
        for move in moves:
            if mesh.rank not in (move.source, move.target):
                continue
            is_target = mesh.rank == move.target
            other = move.source if is_target else move.target
            is_read = self.twins is not None and self.twins.reaches(move.piece, other)
            if is_read and not is_target:
                continue
            parts = incoming(move) if is_target else outgoing(move)
            received_bytes += sum(part.nbytes for part in parts.values()) if is_target else 0
            if not is_read:
                way = dist.irecv if is_target else dist.isend
                ops += [dist.P2POp(way, part, other, mesh.moving) for part in parts.values()]
            else:
                reads.append((move, parts))
        with mesh.watch.waiting(what):
            works = dist.batch_isend_irecv(ops) if ops else []
        for move, parts in reads:
            assert self.twins is not None
            for name, part in parts.items():
                mark = self.pieces[move.piece].updates_after(num_updates)
                self.twins.read(move.piece, name, move.source, move.start, part, mark)
        meanwhile()
        with mesh.watch.waiting(what):
            for work in works:
                work.wait()
        return received_bytes


class StateArrival:
    """Moves one switch's optimizer state on one rank.

    Args:
        before: by piece, what this rank owned in the old layout.
        num_updates: that state and weights are of.
        lost: indices of pieces that this rank holds no more.
        memory: private memory of these; emptied when all ranks have their weights.
    """

    def __init__(
        self,
        layer: TwinLayer,
        moves: Sequence[Move],
        old: Mesh,
        new: Mesh,
        before: Mapping[int, Shards],
        num_updates: int,
        lost: Sequence[int] = (),
        memory: list[object] | None = None,
    ) -> None:
        self.received_bytes = 0
        self._layer, self._moves, self._old, self._new, self._before = layer, moves, old, new, before
        self._num_updates, self._lost, self._memory = num_updates, lost, memory or []
        self._stream = torch.cuda.Stream(new.device) if new.device.type == "cuda" else None
        if self._stream is not None:
            # Now, and not in the thread: what is queued from here on is the step's, which the state does not wait for.
            self._stream.wait_stream(torch.cuda.current_stream(new.device))
        self.thread = Background(self._move, "evenload-state")

    def wait(self) -> tuple[Mapping[int, Shards], float]:
        """Return by piece what this rank owns in the new layout, and the seconds waited. Raises what went wrong."""
        from_s = time.perf_counter()
        after = self.thread.result()
        if self._stream is not None:
            step = torch.cuda.current_stream(self._new.device)
            step.wait_stream(self._stream)
            for tensor in (tensor for shards in after.values() for tensor in shards.values()):
                # Made on the stream of transfers, read on this one: its memory is not reused before that is done.
                tensor.record_stream(step)
        return after, time.perf_counter() - from_s

    def _move(self) -> Mapping[int, Shards]:
        layer, new, what = self._layer, self._new, "optimizer state of the new layout"
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            layer.wait_for_all(new, "the weights of all ranks in the new layout", new.moving)
            self._memory.clear()
            for index in self._lost:
                if (shared := layer.pieces[index].shared) is not None:
                    shared.release(WEIGHTS)
            pieces = enumerate(layer.pieces)
            after = {at: self._target(live, at) for at, live in pieces if live.is_held and live.is_trained}
            self.received_bytes = layer.transfer(
                self._moves,
                new,
                self._num_updates,
                what,
                lambda move: self._part(after, new, move),
                lambda move: self._part(self._before, self._old, move),
                meanwhile=lambda: self._keep_all(after),
            )
            layer.wait_for_all(new, what, new.moving)
            self._free_state()
        return after

    def _free_state(self) -> None:
        """Free shared state that is owned no more; private memory goes with the last view of it."""
        if self._layer.twins is not None:
            for index in self._lost:
                self._layer.twins.mark(index, None)
        for index in self._before:
            live = self._layer.pieces[index]
            if live.shared is None:
                continue
            wanted = live.share_in(self._new) if live.is_held else (0, 0)
            for start, stop in without(live.share_in(self._old), wanted):
                for name in live.state_names:
                    live.shared.release(name, start, stop)

    def _part(self, shards: Mapping[int, Shards], mesh: Mesh, move: Move) -> Shards:
        first = self._layer.pieces[move.piece].share_in(mesh)[0]
        return {name: shard[move.start - first : move.stop - first] for name, shard in shards[move.piece].items()}

    def _target(self, live: LivePiece, index: int) -> Shards:
        """Return where the state of a piece goes, in elements that this rank is to own; padding is zeros."""
        wanted = live.share_in(self._new)
        size = padded_size(live.piece.num_elements, self._new.data_size) // self._new.data_size
        kept = self._before.get(index)
        is_same = kept is not None and live.shared is None and live.share_in(self._old) == wanted
        if kept is not None and is_same and kept[live.state_names[0]].numel() == size:
            return kept
        assert live.buffer is not None
        shards: dict[str, Tensor] = {}
        for name in live.state_names:
            if live.shared is not None:
                shards[name] = live.shared.tensor(name, wanted[0], wanted[0] + size)
            else:
                shards[name] = live.buffer.grads.new_empty(size)
            shards[name][wanted[1] - wanted[0] :].zero_()
        return shards

    def _keep_all(self, after: Mapping[int, Shards]) -> None:
        """Copy private state that this rank owned before and owns now; shared state stays where it is."""
        for index, before in self._before.items():
            shards, live = after.get(index, before), self._layer.pieces[index]
            if shards is before or live.shared is not None:
                continue
            had, wanted = live.share_in(self._old), live.share_in(self._new)
            start, stop = max(had[0], wanted[0]), min(had[1], wanted[1])
            for name, shard in shards.items():
                if start < stop:
                    shard[start - wanted[0] : stop - wanted[0]].copy_(before[name][start - had[0] : stop - had[0]])


def without(share: Elements, other: Elements) -> list[Elements]:
    """Return the elements of a share that are not in another; at most two ranges."""
    start, stop = share
    low, high = max(other[0], start), min(other[1], stop)
    parts = ((start, low), (high, stop)) if low < high else (share,)
    return [part for part in parts if part[0] < part[1]]
