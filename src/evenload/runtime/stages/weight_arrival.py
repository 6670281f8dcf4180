"""Weights on their way to the ranks that lack them, before a step: read from the memory of a rank of the same machine
where it is shared (`twin_memory`), else sent, straight into the memory where they stay.

    marks ─► barrier ─► sends and receives are posted ─► reads ─► waits ─► (several machines: barrier ─► relayed reads)

The first barrier says that every rank has made its last update, the second that what is relayed has come. What ranks
read stays until all have read it: whoever lets go of it waits for that (`state_arrival`).
"""

from collections.abc import Collection, Sequence

import torch.distributed as dist

from evenload.plan.reconfiguration.moves import Move, Moves
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.stages.live_pieces import LivePiece
from evenload.runtime.stages.twin_memory import WEIGHTS, TwinMemory

_WAIT = "weights of layout {}"


def mark_held(pieces: Sequence[LivePiece], twins: TwinMemory, num_updates: int, but: Collection[int] = ()) -> None:
    """What this rank holds may be read as of so many updates, and nothing else; nor some pieces, by index."""
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
    """Bytes that this rank received. Collective; `RankLostError` where a rank does not come.

    Args:
        pieces: those that this rank gains have their memory.
        num_updates: made so far.
        there: indices of the pieces that were read ahead.
    """
    waiting = mesh.watch.waiting
    if twins is not None:
        # Those that are gained have memory, and no values yet.
        gained = {move.piece for move in (*moves.weights, *moves.relayed) if move.target == mesh.rank}
        mark_held(pieces, twins, num_updates, gained)
        with waiting(_WAIT.format(mesh.layout.describe())):
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
    with waiting(_WAIT.format(mesh.layout.describe())):
        works = dist.batch_isend_irecv(ops) if ops else []
    for move in reads:
        _read(pieces, move, twins, num_updates, there)
    with waiting(_WAIT.format(mesh.layout.describe())):
        for work in works:
            work.wait()
    if twins is not None and mesh.num_ranks > mesh.ranks_per_machine:
        for move in moves.weights:
            if mesh.rank == move.target:
                twins.mark(move.piece, mark_of(pieces[move.piece], num_updates))
        with waiting(_WAIT.format(mesh.layout.describe())):
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
