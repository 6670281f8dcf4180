"""`Arrival`: how weights and optimizer state come to ranks that lack them in a new layout, while its first step runs.

    weights  sends and receives are posted; then, piece by piece as forwards read them, read what ranks of the machine
             offer (`twin_layer`), wait for what is sent, offer what is relayed
             ─► all have theirs (barrier) -> free old weights
    state    the same for the shares of optimizer state ─► all have theirs (barrier) -> free old state

All of it runs in a thread, on a GPU in a stream of its own behind what made the old values. A forward waits for its own
unit alone (`await_unit`), the first backward for all weights (`finish`), the optimizer's update for its state (`wait`);
nothing changes a weight or a state before that. Whoever reads from a rank waits until it is offered, and offers what it
relays only once it is there.

All ranks post in the order of pieces before they wait, and whoever is at the first piece that is not complete waits for
none behind it, so there is no circle of waits. Of the group `moving` only this thread makes calls, in one order.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from evenload.planning.layouts.moves import Move, Moves
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.comm.watch import Background
from evenload.runtime.device import step_clock
from evenload.runtime.optim.data_parallel import GatherTrace, padded_size
from evenload.runtime.stages.live_pieces import LivePiece
from evenload.runtime.stages.twin_layer import WEIGHTS, Elements, MovedParts, Shards, Transport

_Posted = tuple[list[dist.Work], list[tuple[Move, Shards]]]
"""Transfers that were begun, and moves that this rank is to read."""


class Arrival:
    """Moves one switch's weights and optimizer state on one rank.

    Args:
        twins: what the machine shares; None = nothing.
        weights: by piece, of what this rank holds in one layout or both, flat and in place.
        before: by piece, the shards of optimizer state that this rank owned in the old layout.
        num_updates: that state and weights are of.
    """

    def __init__(
        self,
        pieces: Sequence[LivePiece],
        twins: Transport | None,
        moves: Moves,
        old: Mesh,
        new: Mesh,
        weights: dict[int, Tensor],
        before: Mapping[int, Shards],
        num_updates: int,
    ) -> None:
        self.weight_bytes = self.state_bytes = 0
        """Received, once they are there."""
        self._pieces, self._twins, self._moves, self._old, self._new = pieces, twins, moves, old, new
        self._weights, self._before, self._num_updates = weights, before, num_updates
        self._lost = [index for index in weights if not pieces[index].is_held]
        sent = {move.piece for move in moves.weights if move.source == new.rank}
        self._unsent = [index for index in self._lost if index not in sent]
        for index in self._unsent:
            del weights[index]  # private memory; giving back pages takes time, so the thread does it
        # Pieces are in the order of units; what comes to a machine once is relayed before the next piece.
        self._by_piece: dict[int, list[Move]] = defaultdict(list)
        for move in sorted((*moves.weights, *moves.relayed), key=lambda move: move.piece):
            if new.rank in (move.source, move.target):
                self._by_piece[move.piece].append(move)
        gained = (move.piece for move in (*moves.weights, *moves.relayed) if move.target == new.rank)
        self._last_of = {pieces[index].piece.unit: index for index in sorted(gained)}
        self._awaited = set(self._last_of)
        self._arrived: dict[int, Future[torch.cuda.Event | None]] = {unit: Future() for unit in self._last_of}
        self._clock, self._waits = step_clock(new.device), list[object]()
        self._clock.start()  # after what was queued before
        self._stream = torch.cuda.Stream(new.device) if new.device.type == "cuda" else None
        if self._stream is not None:
            # Now, and not in the thread: what is queued from here on is the step's, which transfers do not wait for.
            self._stream.wait_stream(torch.cuda.current_stream(new.device))
        self.thread = Background(self._run, "evenload-arrival")

    def await_unit(self, unit: int) -> None:
        """Wait until a unit's weights are there, on a GPU for what is computed next; raise what went wrong."""
        if unit not in self._awaited:
            return
        start = self._clock.mark()
        with self._new.watch.waiting(f"the weights of unit {unit} in the new layout"):
            self._arrived[unit].exception()  # waits, and raises nothing
        if (event := self._arrived[unit].result()) is not None:
            torch.cuda.current_stream(self._new.device).wait_event(event)
        self._waits += [start, self._clock.mark()]
        self._awaited.remove(unit)

    def finish(self) -> None:
        """Wait for all weights as `await_unit` does."""
        for unit in sorted(self._awaited):
            self.await_unit(unit)

    def take_traces(self, mesh: Mesh) -> list[GatherTrace]:
        """Return none: nothing is gathered between the ranks of one stage."""
        return []

    def waited_s(self) -> float:
        """Return the seconds that the step waited for weights. Waits for a GPU."""
        seconds = self._clock.seconds(self._waits)
        return sum(seconds[1::2]) - sum(seconds[::2])

    def wait(self) -> Mapping[int, Shards]:
        """Wait for everything; return by piece what this rank owns in the new layout. Raises what went wrong."""
        self.finish()
        after = self.thread.result()
        if self._stream is not None:
            step = torch.cuda.current_stream(self._new.device)
            step.wait_stream(self._stream)
            for tensor in (tensor for shards in after.values() for tensor in shards.values()):
                # Made on the stream of transfers, read on this one: its memory is not reused before that is done.
                tensor.record_stream(step)
        return after

    def _run(self) -> Mapping[int, Shards]:
        try:
            with torch.cuda.stream(self._stream):  # None: of a CPU, nothing
                self._bring_weights()
                return self._bring_state()
        except BaseException as error:  # whatever it is, who waits raises it
            for unit in self._arrived.values():
                if not unit.done():
                    unit.set_exception(error)
            raise

    def _bring_weights(self) -> None:
        what, rank = f"weights of layout {self._new.layout.describe()}", self._new.rank
        relayed = set(self._moves.relayed)
        self._offer((move for move in self._moves.weights if move.source == rank), self._weights_of)
        posted = {at: self._post(some, self._weights_of, self._weights_of, what) for at, some in self._by_piece.items()}
        for index, some in self._by_piece.items():
            self._complete(posted.pop(index), what)
            self.weight_bytes += sum(self._weights[index].nbytes for move in some if move.target == rank)
            self._offer((move for move in some if move.source == rank and move in relayed), self._weights_of)
            if self._last_of.get(unit := self._pieces[index].piece.unit) == index:
                self._note(unit)
        # Not behind the barrier: what copies out, and what copies in, use the two directions of a link.
        self._offer((move for move in self._moves.state if move.source == rank), self._old_part)
        self._release_weights(self._unsent)
        self._wait_for_all("the weights of all ranks in the new layout")
        self._release_weights(set(self._lost) - set(self._unsent))
        self._weights.clear()

    def _release_weights(self, lost: Iterable[int]) -> None:
        for index in lost:
            if (shared := self._pieces[index].shared) is not None:
                shared.release(WEIGHTS)

    def _note(self, unit: int) -> None:
        """Let whoever awaits a unit go on, on a GPU behind what was queued so far."""
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
        self._arrived[unit].set_result(event)

    def _bring_state(self) -> Mapping[int, Shards]:
        new, what, moves = self._new, "optimizer state of the new layout", self._moves.state
        after = {at: self._target(live, at) for at, live in enumerate(self._pieces) if live.is_held and live.is_trained}
        incoming: MovedParts = lambda move: self._part(after, new, move)  # noqa: E731
        posted = self._post(moves, incoming, self._old_part, what)
        self._keep_all(after)
        self._complete(posted, what)
        received = [incoming(move) for move in moves if move.target == new.rank]
        self.state_bytes = sum(part.nbytes for parts in received for part in parts.values())
        self._wait_for_all(what)
        self._free_state()
        return after

    def _offer(self, moves: Iterable[Move], parts: MovedParts) -> None:
        """Let other ranks read what these moves take from here, where they do."""
        if self._twins is not None:
            self._twins.offer([move for move in moves if self._is_read(move, move.target)], parts, self._updates_of)

    def _updates_of(self, index: int) -> int:
        return self._num_updates if self._pieces[index].is_trained else 0  # frozen weights never see any

    def _is_read(self, move: Move, other: int) -> bool:
        return self._twins is not None and self._twins.reaches(move.piece, other)

    def _post(self, moves: Sequence[Move], incoming: MovedParts, outgoing: MovedParts, what: str) -> _Posted:
        """Begin this rank's moves, by sending where the two ends do not share memory."""
        ops, reads, rank, group = list[dist.P2POp](), list[tuple[Move, Shards]](), self._new.rank, self._new.moving
        for move in moves:
            if move.target == rank and self._is_read(move, move.source):
                reads.append((move, incoming(move)))
            elif move.target == rank:
                ops += [dist.P2POp(dist.irecv, part, move.source, group) for part in incoming(move).values()]
            elif move.source == rank and not self._is_read(move, move.target):
                ops += [dist.P2POp(dist.isend, part, move.target, group) for part in outgoing(move).values()]
        with self._new.watch.waiting(what):
            return dist.batch_isend_irecv(ops) if ops else [], reads

    def _complete(self, posted: _Posted, what: str) -> None:
        works, reads = posted
        with self._new.watch.waiting(what):
            for move, parts in reads:
                assert self._twins is not None
                self._twins.fetch(move, parts, self._updates_of(move.piece))
            for work in works:
                work.wait()

    def _wait_for_all(self, what: str) -> None:
        """Wait until transfers of this rank are done, and, where ranks share memory, those of all: what they came from
        may be freed. Collective."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._twins is not None:
            with self._new.watch.waiting(what):
                everyone = torch.zeros(1, device=self._new.device)  # NCCL's barrier guesses the device
                dist.all_reduce(everyone, group=self._new.moving)
                float(everyone)  # and this waits for a GPU, too

    def _weights_of(self, move: Move) -> Shards:
        return {WEIGHTS: self._weights[move.piece]}

    def _old_part(self, move: Move) -> Shards:
        return self._part(self._before, self._old, move)

    def _part(self, shards: Mapping[int, Shards], mesh: Mesh, move: Move) -> Shards:
        first = self._pieces[move.piece].share_in(mesh)[0]
        return {name: shard[move.start - first : move.stop - first] for name, shard in shards[move.piece].items()}

    def _free_state(self) -> None:
        """Free shared state that is owned no more; private memory goes with the last view of it."""
        if self._twins is not None:
            self._twins.withdraw(self._lost)
        for index in self._before:
            live = self._pieces[index]
            if live.shared is None:
                continue
            wanted = live.share_in(self._new) if live.is_held else (0, 0)
            for start, stop in without(live.share_in(self._old), wanted):
                for name in live.state_names:
                    live.shared.release(name, start, stop)

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
            shards, live = after.get(index, before), self._pieces[index]
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
