"""`TakenAhead`: what of a coming switch can be done while the step before it still trains.

Plans are made steps ahead, so a rank knows which layout comes. The update before the switch changes weights and
optimizer state, but not where they will lie: a thread takes the memory of all that the rank will hold, page by page
(page faults are half of a switch whose values are copied at the speed of memory), and reads frozen pieces from
the machine's shared memory. It needs no other rank, so each decides for itself whether there is room.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence

from evenload.plan.reconfiguration.moves import Moves
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.stages.live_pieces import LivePiece
from evenload.runtime.stages.sparse_memory import touch
from evenload.runtime.stages.twin_memory import WEIGHTS, PieceMemory, TwinMemory

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Elements of pieces, by index."""


class TakenAhead:
    """For one switch, on one rank.

    Args:
        mesh: of the layout that comes.
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
        """Until all is taken, or, where another layout comes, given back. Raises what went wrong."""
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
