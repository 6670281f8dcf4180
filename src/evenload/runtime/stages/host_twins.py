"""`HostTwins`: GPUs of a node move pieces of the model through page-locked memory that all of their processes map.

One file without a name, made by the first of the ranks that have the same tensor-parallel place, has one place for
everything that may move:

    marks: of every rank of weights, and of state, of every piece | weights of piece 0 | exp_avg of piece 0 | ...

A switch is a pipeline of pieces. The rank from which a move comes copies it out behind what made it, and marks it when
it is there; the rank to which it goes waits for the mark and copies it in, on the stream of its arrival. Two ranks that
give the same elements write the same bits. When all ranks have everything, marks are taken back.

Price: host memory of all weights and optimizer state of what is shared, once a node, page-locked when the run begins.
Copies out have a thread, on a GPU with a stream of its own; on a CPU the same protocol runs on plain memory.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import groupby

import torch
from torch import Tensor

from evenload.planning.layouts.moves import Move
from evenload.runtime.comm.mesh import Mesh, gather_from_all
from evenload.runtime.stages.twin_layer import (
    ABSENT,
    WEIGHTS,
    MovedParts,
    OtherProcess,
    Parts,
    PieceMemory,
    Shards,
    SparseMemory,
    Transport,
    UpdatesOf,
    place_pieces,
    ranks_here,
)


class HostTwins(Transport):
    """One rank's view of the file. `others`: processes of the ranks that map it, this one's too, by rank."""

    def __init__(
        self,
        own: SparseMemory,
        others: Mapping[int, OtherProcess],
        pieces: Mapping[int, PieceMemory],
        marks: Tensor,
        mesh: Mesh,
        patience_s: float,
    ) -> None:
        self.pieces, self._others, self._memory, self._patience_s = pieces, others, own, patience_s
        self._marks = dict(zip(others, marks, strict=True))  # by rank, [weights or state, pieces]
        self._own_marks, self._device = self._marks[mesh.rank], mesh.device
        self._stream = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evenload-twins")
        self._copies: list[Future[None]] = []

    def reaches(self, piece: int, rank: int) -> bool:
        return piece in self.pieces and rank in self._others

    def offer(self, moves: Sequence[Move], parts: MovedParts, updates: UpdatesOf) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for piece, some in groupby(moves, key=lambda move: move.piece):
            given = {(move.start, move.stop): parts(move) for move in some}  # once for all ranks that take it
            self._copies.append(self._thread.submit(self._copy_out, piece, given, updates(piece)))

    def fetch(self, move: Move, parts: Shards, num_updates: int) -> None:
        marks, is_state = self._marks[move.source], WEIGHTS not in parts
        what = f"rank {move.source} was to have {', '.join(parts)} of piece {move.piece} in host memory"
        found = lambda: int(marks[int(is_state), move.piece])  # noqa: E731
        self._others[move.source].await_mark(found, num_updates, self._patience_s, what)
        for name, part in parts.items():
            part.copy_(self.pieces[move.piece].tensor(name, move.start, move.stop), non_blocking=True)

    def withdraw(self, lost: Collection[int]) -> None:
        while self._copies:  # done, as whoever they are for has read them
            self._copies.pop(0).result()
        self._own_marks.fill_(ABSENT)

    def _copy_out(self, piece: int, given: Mapping[tuple[int, int], Shards], num_updates: int) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for (start, stop), parts in given.items():
                for name, part in parts.items():
                    self.pieces[piece].tensor(name, start, stop).copy_(part, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        for parts in given.values():
            self._own_marks[int(WEIGHTS not in parts), piece] = num_updates


def open_host_twins(parts: Parts, capacities: Sequence[int], mesh: Mesh, patience_s: float) -> HostTwins | str:
    """Make the file, or map that of the first rank, and page-lock it; the reason where some rank cannot. Arguments as
    of `open_twins`. Collective."""
    here, reason, opened, others = ranks_here(mesh), "", None, dict[int, OtherProcess]()
    shape = torch.Size((len(here), 2, len(parts)))
    addresses: list = [None] * mesh.num_ranks
    for turn in range(3):  # the first rank makes it, the others map it, all find each other
        try:
            if turn == 2:
                others = {rank: OtherProcess(addresses[rank][0]) for rank in here}
            elif (turn == 0) == (mesh.rank == here[0]):
                opened = place_pieces(parts, capacities, shape.numel(), addresses[here[0]])
                if mesh.device.type == "cuda":
                    opened[0].page_lock()
        except OSError as error:
            reason = f"rank {mesh.rank}: {error}"
        told = gather_from_all((reason, opened and opened[0].address), mesh)
        if reasons := [one for one, _ in told if one]:
            return reasons[0]
        addresses = [address for _, address in told]
    assert opened is not None
    own, pieces = opened
    marks = own.tensor(0, shape.numel(), torch.int64).view(shape)
    return HostTwins(own, others, pieces, marks, mesh, patience_s)
