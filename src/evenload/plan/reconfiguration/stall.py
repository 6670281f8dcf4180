"""Predicted seconds of a switch from its own moves: how long training stands still, and how long state is on its way.

    stall   what every switch takes + stages, pieces that come and go, of the rank with most of them
            + the longer of what is sent and what is read + what is relayed + fresh memory
    state   the longer of what is sent and what is read; the step hides it, as far as that lasts

Reading is priced by what ranks of a machine measured of it (`CopySpec`), sending by links. Without measured copies what
would be read is priced as if it were sent inside the machine, and nothing else takes time.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from evenload.cost.coefficients import CopySpec, CostCoefficients
from evenload.plan.reconfiguration.moves import Move, Moves, Piece, holders, moved_bytes, moving_seconds
from evenload.plan.reconfiguration.switch_pieces import SwitchPieces
from evenload.types.layout import ParallelLayout


def stall_seconds(
    moves: Moves,
    moved: SwitchPieces,
    coefficients: CostCoefficients,
    old: ParallelLayout,
    new: ParallelLayout,
    *,
    is_taken: bool,
) -> float:
    """Until the step can begin.

    Args:
        is_taken: the memory was taken in the step before.
    """
    copies = coefficients.copies
    both_s = _both_ways(moves.weights, moved, coefficients, of_state=False)
    relayed_s = _both_ways(moves.relayed, moved, coefficients, of_state=False)
    if copies is None:
        return both_s + relayed_s
    machines: dict[int, float] = defaultdict(float)
    for rank, count in _received([*moves.weights, *moves.relayed], moved.pieces, of_state=False).items():
        machines[rank // moved.ranks_per_machine] += count * moved.tp
    taking_s = 0.0 if is_taken else max(machines.values(), default=0.0) / copies.taken_bytes_per_s
    return _arranging_seconds(copies, moved.pieces, old, new) + both_s + relayed_s + taking_s


def state_seconds(moves: Moves, moved: SwitchPieces, coefficients: CostCoefficients) -> float:
    """Until all optimizer state has come, with nothing else to do."""
    return _both_ways(moves.state, moved, coefficients, of_state=True)


def _arranging_seconds(copies: CopySpec, pieces: Sequence[Piece], old: ParallelLayout, new: ParallelLayout) -> float:
    """Whatever moves: ranks meet, and the one with most to do has its stages and pieces in place."""
    layers: dict[int, int] = defaultdict(int)
    gained: dict[int, int] = defaultdict(int)
    left: dict[int, int] = defaultdict(int)
    for piece in pieces:
        before, after = holders(old, piece), holders(new, piece)
        for rank in after.keys() - before.keys():
            gained[rank] += 1
        for rank in before.keys() - after.keys():
            left[rank] += 1
    for first, last in new.stage_layers:
        for rank in holders(new, Piece(unit=first + 1, num_elements=0, weight_bytes=0)):
            layers[rank] += last - first
    ranks = layers.keys() | gained.keys() | left.keys()
    return max(copies.arranging_seconds(layers[rank], gained[rank], left[rank]) for rank in ranks)


def _both_ways(moves: Sequence[Move], moved: SwitchPieces, coefficients: CostCoefficients, *, of_state: bool) -> float:
    """Sent and read at once."""
    copies, sent, read = coefficients.copies, [], []
    for move in moves:
        (read if copies is not None and moved.is_read(move) else sent).append(move)
    sent_s = moving_seconds(sent, moved.pieces, coefficients, of_state=of_state)
    if copies is None:
        return sent_s
    received = _received(read, moved.pieces, of_state=of_state)
    return max(sent_s, copies.seconds(received, moved.ranks_per_machine, moved.tp))


def _received(moves: Sequence[Move], pieces: Sequence[Piece], *, of_state: bool) -> Mapping[int, float]:
    """Bytes by rank."""
    found: dict[int, float] = defaultdict(float)
    for move in moves:
        found[move.target] += moved_bytes([move], pieces, of_state=of_state)
    return found
