"""Memory of a switch: what a device holds while one layout becomes another, and behind the first step in the new one.

    the switch      weights and gradients of the pieces of both layouts, and the optimizer state of both shares: what is
                    gained is taken, and filled, before what is left can go
    the first step  its own peak, and beside it the optimizer state that other devices still read, until their update

A piece, or an element of optimizer state, that a device has in both layouts counts once: it stays where it is
(`runtime.stages.twin_memory`). Of a piece that is not shared, a share that is cut anew is copied, so the kept part
counts twice. Price: O(pieces · devices) in plain Python, below a millisecond for forty layers on sixteen devices.
"""

from evenload.plan.reconfiguration.moves import holders, state_share
from evenload.plan.reconfiguration.switch_pieces import SwitchPieces
from evenload.types.base import Frozen
from evenload.types.layout import ParallelLayout


class SwitchMemory(Frozen):
    """Of the fullest device.

    Args:
        switch_bytes: held at once between the two steps.
        left_bytes: held beside the first step, of what the new layout does not have there.
    """

    switch_bytes: int
    left_bytes: int


def switch_memory(moved: SwitchPieces, old: ParallelLayout, new: ParallelLayout) -> SwitchMemory:
    """What a change between two layouts takes."""
    devices = max(old.world_size, new.world_size)
    both, left = [0] * devices, [0] * devices
    for index, piece in enumerate(moved.pieces):
        gradient_bytes = max(piece.weight_bytes, 4) if piece.state_bytes else 0
        before, after = holders(old, piece), holders(new, piece)
        for rank in before.keys() | after.keys():
            both[rank] += piece.num_elements * (piece.weight_bytes + gradient_bytes)
            had = state_share(old, piece, *before[rank]) if rank in before else (0, 0)
            wanted = state_share(new, piece, *after[rank]) if rank in after else (0, 0)
            kept = max(0, min(had[1], wanted[1]) - max(had[0], wanted[0]))
            lies_twice = 0 if index in moved.shared or had == wanted else kept
            both[rank] += piece.state_bytes * (had[1] - had[0] + wanted[1] - wanted[0] - kept + lies_twice)
            left[rank] += piece.state_bytes * (had[1] - had[0] - kept + lies_twice)
    return SwitchMemory(switch_bytes=max(both), left_bytes=max(left))
