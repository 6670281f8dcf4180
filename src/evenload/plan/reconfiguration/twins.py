"""Twins: pieces of the model that lie in memory which all processes of a machine read (FlexPipe §4, TwinLayer).

FlexPipe keeps a copy of every layer of a machine in its host memory, from which a device that gains a layer reads it.
Where devices compute in host memory the layer itself can lie there: it is always of the last step, and takes nothing
beside what training holds anyway. So a budget bounds how much of a machine's memory is shared, not what is added.

A piece is shared whole, weights and optimizer state, on all ranks or on none. Pieces are taken in the order of the
model, embedding first; one that does not fit into what is left of the budget is left out, and travels between
processes like any other. Pure and the same on every rank.
"""

from collections.abc import Sequence

from evenload.plan.reconfiguration.moves import Piece, holders, state_share
from evenload.types.layout import ParallelLayout


def shared_pieces(
    pieces: Sequence[Piece], layouts: Sequence[ParallelLayout], ranks_per_node: int, budget_bytes: int | None
) -> frozenset[int]:
    """Indices of the pieces that are shared.

    Args:
        layouts: that the run may take.
        budget_bytes: most bytes of one machine, in any of the layouts; None = no limit.
    """
    if budget_bytes is None:
        return frozenset(range(len(pieces)))
    # A tensor-parallel rank knows the parts of its own place, and has a share of the budget for them.
    left, found = budget_bytes // layouts[0].tp, set()
    for index, piece in enumerate(pieces):
        if (needed := shared_bytes(piece, layouts, ranks_per_node)) <= left:
            found.add(index)
            left -= needed
    return frozenset(found)


def shared_bytes(piece: Piece, layouts: Sequence[ParallelLayout], ranks_per_node: int) -> int:
    """The most that one piece takes of a machine: of its holders there, weights whole and shares of optimizer state,
    each in the layout that has most of it."""
    most = 0
    for layout in layouts:
        by_node: dict[int, int] = {}
        for rank, place in holders(layout, piece).items():
            start, stop = state_share(layout, piece, *place)
            held = piece.num_elements * piece.weight_bytes + (stop - start) * piece.state_bytes
            by_node[rank // ranks_per_node] = by_node.get(rank // ranks_per_node, 0) + held
        most = max(most, *by_node.values())
    return most
