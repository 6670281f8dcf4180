"""Where the lanes of a data set stand between two documents: all that a loader's state says about them."""

from evenload.data.ledger import Tally
from evenload.data.reading.block import BlockCursor
from evenload.types.base import Frozen


class DocumentPlace(Frozen, array_like=True):
    """Where a document can be read again: its block, and which one of it. `checksum` is of the block."""

    part: int
    lane: int
    epoch: int
    cursor: BlockCursor
    index: int
    checksum: int


class LaneState(Frozen, array_like=True):
    """A lane between two documents.

    Args:
        cursor: of the open block, or of the next one; None = the lane has ended for this epoch.
        taken: documents of that block that came already.
        left: what is left of the open block; it was counted as read.
        checksum: of the open block, where documents of it came already.
    """

    cursor: BlockCursor | None = BlockCursor()
    taken: int = 0
    left: Tally = Tally()
    checksum: int | None = None


class PartState(Frozen, array_like=True):
    """A part of the mixture between two documents.

    Args:
        epoch: pass over this part (the run's epoch, unless parts repeat).
        turn: lane that is asked next.
        documents: sampled in this pass.
        tokens: sampled since the weights began to count.
    """

    epoch: int
    turn: int
    documents: int
    tokens: int
    lanes: tuple[LaneState, ...]
