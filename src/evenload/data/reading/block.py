"""`DocumentBlock`: a run of consecutive documents of one stream, shuffled inside; and its cursor.

A stream is a sequence of blocks. A block is a pure function of settings, epoch, stream and cursor: whoever needs it, on
whichever rank, in whichever process, before or after a resume, reads the same documents in the same order. So the
whole state of a stream is its open block's cursor and how many documents of it were taken.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.data.encoding.token_table import Span
from evenload.data.ledger import Tally
from evenload.types.base import Frozen


class BlockCursor(Frozen, array_like=True):
    """Where a block begins in its stream.

    Args:
        block: its number in the stream and epoch.
        segment: position in the stream's list of segments.
        offset: of the next record there, in the reader's terms; None = the segment's beginning.
        part: documents of that record that came already (a record that is split into several).
    """

    block: int = 0
    segment: int = 0
    offset: int | None = None
    part: int = 0


class StreamKey(NamedTuple):
    """A stream: part of the mixture, and stream in it."""

    part: int
    stream: int


class BlockRequest(NamedTuple):
    """Asks for the block that begins at a cursor."""

    key: StreamKey
    epoch: int
    cursor: BlockCursor


class BlockHeader(Frozen, array_like=True):
    """A block without its tokens: what all ranks know of it.

    Args:
        next_cursor: of the stream's next block; None = the stream ends here for this epoch.
        lengths, num_labels: int32[num_documents] as bytes, in sampling order.
        has_labels: some document's labels differ from its tokens.
        checksum: CRC-32 of tokens and labels, to notice a source that changed between save and resume.
        read: documents and tokens read from the source for this block, dropped ones included.
        dropped: by reason.
    """

    cursor: BlockCursor
    next_cursor: BlockCursor | None
    lengths: bytes
    num_labels: bytes
    has_labels: bool
    checksum: int
    read: Tally
    dropped: dict[str, Tally]


@dataclass(frozen=True, eq=False, slots=True)
class DocumentBlock:
    """A block with its tokens.

    Args:
        edges: int64[num_documents + 1]; document i has tokens `[edges[i], edges[i + 1])`.
        tokens: int32[num_tokens]; labels: int32[num_tokens] (-100 = no loss), or None where every token but a
            document's first is a label.
    """

    header: BlockHeader
    edges: NDArray[np.int64]
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32] | None

    def span(self, index: int) -> Span:
        return self.tokens, self.labels, int(self.edges[index]), int(self.edges[index + 1])
