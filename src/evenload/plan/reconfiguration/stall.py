"""Predicted seconds of a switch from its own moves: how long training stands still, and how long state is on its way.

    stall   stages are arranged + the longer of what is sent and what is read + what is relayed + fresh memory
    state   the longer of what is sent and what is read; the step hides it, as far as that lasts

Reading is priced by what ranks of a machine measured of it (`CopySpec`), sending by links. Without measured copies what
would be read is priced as if it were sent inside the machine.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from evenload.cost.coefficients import CostCoefficients
from evenload.plan.reconfiguration.moves import Move, Moves, Piece, moved_bytes, moving_seconds
from evenload.types.layout import ParallelLayout


def stall_seconds(
    moves: Moves,
    pieces: Sequence[Piece],
    shared: Collection[int],
    coefficients: CostCoefficients,
    ranks_per_machine: int,
    new: ParallelLayout,
    *,
    is_taken: bool,
) -> float:
    """Until the step can begin.

    Args:
        shared: indices of pieces that ranks of a machine read.
        new: the layout that comes.
        is_taken: the memory was taken in the step before.
    """
    copies = coefficients.copies
    both_s = _both_ways(moves.weights, pieces, shared, coefficients, ranks_per_machine, of_state=False)
    relayed_s = _both_ways(moves.relayed, pieces, shared, coefficients, ranks_per_machine, of_state=False)
    if copies is None:
        return both_s + relayed_s
    machines: dict[int, float] = defaultdict(float)
    for rank, count in _received([*moves.weights, *moves.relayed], pieces, of_state=False).items():
        machines[rank // ranks_per_machine] += count
    taking_s = 0.0 if is_taken else max(machines.values(), default=0.0) / copies.taken_bytes_per_s
    return copies.arranging_seconds(new) + both_s + relayed_s + taking_s


def state_seconds(
    moves: Moves,
    pieces: Sequence[Piece],
    shared: Collection[int],
    coefficients: CostCoefficients,
    ranks_per_machine: int,
) -> float:
    """Until all optimizer state has come, with nothing else to do."""
    return _both_ways(moves.state, pieces, shared, coefficients, ranks_per_machine, of_state=True)


def _both_ways(
    moves: Sequence[Move],
    pieces: Sequence[Piece],
    shared: Collection[int],
    coefficients: CostCoefficients,
    ranks_per_machine: int,
    *,
    of_state: bool,
) -> float:
    """Sent and read at once."""
    copies, sent, read = coefficients.copies, [], []
    for move in moves:
        is_near = move.source // ranks_per_machine == move.target // ranks_per_machine
        (read if copies is not None and is_near and move.piece in shared else sent).append(move)
    sent_s = moving_seconds(sent, pieces, coefficients, of_state=of_state)
    if copies is None:
        return sent_s
    return max(sent_s, copies.seconds(_received(read, pieces, of_state=of_state), ranks_per_machine))


def _received(moves: Sequence[Move], pieces: Sequence[Piece], *, of_state: bool) -> Mapping[int, float]:
    """Bytes by rank."""
    found: dict[int, float] = defaultdict(float)
    for move in moves:
        found[move.target] += moved_bytes([move], pieces, of_state=of_state)
    return found
