"""Weights and optimizer state on their way to the ranks that lack them in a new layout.

**Weights** (`bring_weights`), before the first step of the layout: read from the memory of a rank of the same machine
where it is shared (`twin_memory`), else sent, straight to where they stay.

    marks -> barrier -> sends and receives are posted -> reads -> waits -> (several machines: barrier -> relayed reads)

**Optimizer state** (`StateArrival`), in a thread behind the step that already runs in the new layout; only its update
waits for it. On a GPU all of it is queued on a stream of its own, behind what made the old state.

    all have their weights (barrier) -> let old weights go -> state -> all have theirs (barrier) -> let old state go

**Memory** (`Preallocated`), while the step before the switch still trains: a thread takes the memory of all that the
rank will hold, page by page (page faults are half of a switch), and reads frozen pieces. It needs no other rank, so
each decides for itself whether there is room.
"""

import functools
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.plan.layouts.moves import Move, Moves
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.parameter_units import padded_size
from evenload.runtime.stages.live_pieces import LivePiece, share_of_rank
from evenload.runtime.stages.twin_memory import WEIGHTS, PieceMemory, TwinMemory, touch


def mark_held(pieces: Sequence[LivePiece], twins: TwinMemory, num_updates: int, but: Collection[int] = ()) -> None:
    """Mark what this rank holds as of so many updates, and nothing else; nor some pieces, by index."""
    for index, live in enumerate(pieces):
        twins.mark(index, mark_of(live, num_updates) if live.is_held and index not in but else None)


def mark_of(live: LivePiece, num_updates: int) -> int:
    """Updates that a piece is of: frozen ones never see any."""
    return num_updates if live.state_names else 0


def bring_weights(
    pieces: Sequence[LivePiece],
    moves: Moves,
    mesh: Mesh,
    twins: TwinMemory | None,
    num_updates: int,
    there: Collection[int] = (),
) -> int:
    """Return the bytes received; pieces `there` were read ahead. Collective; `RankLostError`: a rank is lost."""
    waiting = functools.partial(mesh.watch.waiting, f"weights of layout {mesh.layout.describe()}")
    if twins is not None:
        # Those that are gained have memory, and no values yet.
        gained = {move.piece for move in (*moves.weights, *moves.relayed) if move.target == mesh.rank}
        mark_held(pieces, twins, num_updates, gained)
        with waiting():
            dist.barrier(group=mesh.control)
    ops, reads = [], []
    for number, move in enumerate(moves.weights):
        if mesh.rank not in (move.source, move.target):
            continue
        other = move.source if mesh.rank == move.target else move.target
        if twins is not None and twins.reaches(move.piece, other):
            reads += [move] if mesh.rank == move.target else []
            continue
        way = dist.irecv if mesh.rank == move.target else dist.isend
        ops += [dist.P2POp(way, tensor, other, mesh.moving, tag=number) for tensor in pieces[move.piece].weights()]
    with waiting():
        works = dist.batch_isend_irecv(ops) if ops else []
    for move in reads:
        _read(pieces, move, twins, num_updates, there)
    with waiting():
        for work in works:
            work.wait()
    if twins is not None and mesh.num_ranks > mesh.ranks_per_machine:
        for move in moves.weights:
            if mesh.rank == move.target:
                twins.mark(move.piece, mark_of(pieces[move.piece], num_updates))
        with waiting():
            dist.barrier(group=mesh.control)
        for move in moves.relayed:
            if mesh.rank == move.target:
                _read(pieces, move, twins, num_updates, there)
    if twins is not None:
        mark_held(pieces, twins, num_updates)
    mine = [move for move in (*moves.weights, *moves.relayed) if move.target == mesh.rank]
    return sum(tensor.nbytes for move in mine for tensor in pieces[move.piece].weights())


def _read(
    pieces: Sequence[LivePiece], move: Move, twins: TwinMemory | None, num_updates: int, there: Collection[int]
) -> None:
    assert twins is not None
    if move.piece in there:
        return
    live = pieces[move.piece]
    for into in live.weights():
        twins.read(move.piece, WEIGHTS, move.source, 0, into, mark_of(live, num_updates))


Shards = Mapping[str, Tensor]
"""Of one piece on one rank, its shard of every tensor of the optimizer, by name."""

_STATE_WAIT = "optimizer state of the new layout"


@dataclass(frozen=True, eq=False)
class Leaving:
    """Holds what a switch left behind here: indices of pieces that are held no more, and their private memory."""

    pieces: Sequence[int] = ()
    memory: Sequence[object] = ()


class StateArrival:
    """Moves one switch's optimizer state on one rank.

    Args:
        before: by piece, what this rank owned in the old layout.
        num_updates: that state and weights are of.
        leaving: what can go when all ranks have their weights.
    """

    def __init__(
        self,
        pieces: Sequence[LivePiece],
        moves: Sequence[Move],
        old: Mesh,
        new: Mesh,
        before: Mapping[int, Shards],
        twins: TwinMemory | None = None,
        num_updates: int = 0,
        leaving: Leaving | None = None,
    ) -> None:
        self.received_bytes = 0
        self._pieces, self._moves, self._old, self._new, self._before = pieces, moves, old, new, before
        self._twins, self._num_updates, self._leaving = twins, num_updates, leaving or Leaving()
        self._after: dict[int, Shards] = {}
        self._error: BaseException | None = None
        self._stream = torch.cuda.Stream(new.device) if new.device.type == "cuda" else None
        if self._stream is not None:
            # Now, and not in the thread: what is queued from here on is the step's, which the state does not wait for.
            self._stream.wait_stream(torch.cuda.current_stream(new.device))
        # A daemon: when training fails, the process must end although this thread may wait for a dead rank.
        self.thread = threading.Thread(target=self._run, name="evenload-state", daemon=True)
        self.thread.start()

    def wait(self) -> tuple[dict[int, Shards], float]:
        """Return by piece what this rank owns in the new layout, and the seconds waited. Raises what went wrong."""
        from_s = time.perf_counter()
        self.thread.join()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            step = torch.cuda.current_stream(self._new.device)
            step.wait_stream(self._stream)
            for tensor in (tensor for shards in self._after.values() for tensor in shards.values()):
                # Made on the stream of transfers, read on this one: its memory is not reused before that is done.
                tensor.record_stream(step)
        return self._after, time.perf_counter() - from_s

    def _run(self) -> None:
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._move()
        except BaseException as error:
            self._error = error

    def _move(self) -> None:
        self._all_have_come("the weights of all ranks in the new layout")
        self._let_weights_go()
        mine = {index: self._target(index) for index, live in enumerate(self._pieces) if self._owns(live)}
        ops, reads = [], []
        for move in self._moves:
            if move.target == self._new.rank:
                parts = _parts(mine[move.piece][1], mine[move.piece][0], move)
                self.received_bytes += sum(part.nbytes for part in parts.values())
                if self._twins is not None and self._twins.reaches(move.piece, move.source):
                    reads.append((move, parts))
                else:
                    ops += [dist.P2POp(dist.irecv, part, move.source, self._new.moving) for part in parts.values()]
            elif move.source == self._new.rank:
                if self._twins is not None and self._twins.reaches(move.piece, move.target):
                    continue
                share = self._share(self._old, move.piece)
                parts = _parts(self._before[move.piece], share, move)
                ops += [dist.P2POp(dist.isend, part, move.target, self._new.moving) for part in parts.values()]
        with self._new.watch.waiting(_STATE_WAIT):
            works = dist.batch_isend_irecv(ops) if ops else []
        for move, parts in reads:
            for name, part in parts.items():
                assert self._twins is not None
                self._twins.read(move.piece, name, move.source, move.start, part, self._num_updates)
        for index, (wanted, shards) in mine.items():
            if index in self._before:
                self._keep(index, wanted, shards)
        with self._new.watch.waiting(_STATE_WAIT):
            for work in works:
                work.wait()
        self._after = {index: shards for index, (_, shards) in mine.items()}
        self._all_have_come(_STATE_WAIT)
        self._let_state_go()

    def _all_have_come(self, what: str) -> None:
        """Nobody reads any more what was to be read so far."""
        if self._twins is not None:
            with self._new.watch.waiting(what):
                dist.barrier(group=self._new.moving)

    def _let_weights_go(self) -> None:
        leaving, self._leaving = self._leaving, Leaving(self._leaving.pieces)
        for index in leaving.pieces:
            if (shared := self._pieces[index].shared) is not None:
                shared.release(WEIGHTS)

    def _let_state_go(self) -> None:
        """Of shared pieces: private memory goes with the last view of it."""
        for index in self._leaving.pieces:
            if self._twins is not None:
                self._twins.mark(index, None)
        for index in self._before:
            live = self._pieces[index]
            if live.shared is None:
                continue
            had = self._share(self._old, index)
            wanted = had[0], had[0]
            if self._owns(live):
                wanted = self._share(self._new, index)
            for start, stop in without(had, wanted):
                for name in live.state_names:
                    live.shared.release(name, start, stop)

    def _share(self, mesh: Mesh, index: int) -> tuple[int, int]:
        return share_of_rank(mesh, self._pieces[index].piece)

    def _owns(self, live: LivePiece) -> bool:
        return live.is_held and bool(live.state_names)

    def _target(self, index: int) -> tuple[tuple[int, int], Shards]:
        """The elements that this rank is to own, and where their state goes."""
        live = self._pieces[index]
        wanted = self._share(self._new, index)
        size = padded_size(live.piece.num_elements, self._new.data_size) // self._new.data_size
        kept = self._before.get(index)
        if kept is not None and live.shared is None:
            had = self._share(self._old, index)
            if had == wanted and kept[live.state_names[0]].numel() == size:
                return wanted, kept
        assert live.buffer is not None
        shards: dict[str, Tensor] = {}
        for name in live.state_names:
            if live.shared is not None:
                shards[name] = live.shared.tensor(name, wanted[0], wanted[0] + size)
            else:
                shards[name] = live.buffer.grads.new_empty(size)
            shards[name][wanted[1] - wanted[0] :].zero_()
        return wanted, shards

    def _keep(self, index: int, wanted: tuple[int, int], shards: Shards) -> None:
        before = self._before[index]
        if shards is before or self._pieces[index].shared is not None:
            return
        had = self._share(self._old, index)
        start, stop = max(had[0], wanted[0]), min(had[1], wanted[1])
        for name, shard in shards.items():
            if start < stop:
                shard[start - wanted[0] : stop - wanted[0]].copy_(before[name][start - had[0] : stop - had[0]])


def without(share: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    """The elements of a share that are not in another; at most two ranges."""
    start, stop = share
    low, high = max(other[0], start), min(other[1], stop)
    parts = ((start, low), (high, stop)) if low < high else (share,)
    return [part for part in parts if part[0] < part[1]]


def _parts(shards: Shards, share: tuple[int, int], move: Move) -> dict[str, Tensor]:
    return {name: shard[move.start - share[0] : move.stop - share[0]] for name, shard in shards.items()}


Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Elements of pieces, by index."""


class Preallocated:
    """Takes memory for one switch to the layout of `mesh`, on one rank.

    Args:
        gained: indices of the pieces that come.
        state: elements of shared pieces whose optimizer state comes.
        after: must have ended before any memory is taken, which it may be giving back.
    """

    def __init__(
        self,
        mesh: Mesh,
        pieces: Sequence[LivePiece],
        gained: Sequence[int],
        state: Ranges,
        moves: Moves,
        twins: TwinMemory | None,
        after: threading.Thread | None,
    ) -> None:
        self.mesh, self.there = mesh, set[int]()
        self._pieces, self._gained, self._state = pieces, gained, state
        self._moves, self._twins, self._after = moves, twins, after
        self._is_unwanted = False
        self._error: BaseException | None = None
        # A daemon: the process must end although this thread may wait for one that waits for a dead rank.
        self._thread = threading.Thread(target=self._run, name="evenload-taken-ahead", daemon=True)
        self._thread.start()

    def finish(self, *, wanted: bool) -> None:
        """Wait until all is taken, or, where another layout comes, given back. Raises what went wrong."""
        self._is_unwanted = not wanted
        self._thread.join()
        if self._error is not None:
            raise self._error
        if wanted:
            return
        self.there.clear()
        for index in self._gained:
            self._pieces[index].give_back()
        for shared, name, start, stop in self._state_places():
            shared.release(name, start, stop)

    def _run(self) -> None:
        try:
            if self._after is not None:
                self._after.join()
            self._take()
        except BaseException as error:
            self._error = error

    def _take(self) -> None:
        sources = {move.piece: move.source for move in self._moves.weights if move.target == self.mesh.rank}
        for index in self._gained:
            if self._is_unwanted:
                return
            live = self._pieces[index]
            live.take()
            source = sources.get(index)
            if self._twins is None or live.state_names or source is None or not self._twins.reaches(index, source):
                continue
            self._twins.read(index, WEIGHTS, source, 0, live.coming, 0)
            self.there.add(index)
        for shared, name, start, stop in self._state_places():
            if self._is_unwanted:
                return
            touch(shared.tensor(name, start, stop))

    def _state_places(self) -> Iterator[tuple[PieceMemory, str, int, int]]:
        for index, ranges in self._state.items():
            live = self._pieces[index]
            assert live.shared is not None
            for name in live.state_names:
                yield from ((live.shared, name, start, stop) for start, stop in ranges)
