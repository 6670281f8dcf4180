"""`RowShard`: which rows of a pack a tensor-parallel rank has between blocks (sequence parallelism).

Token p of document d belongs to rank (d + p) mod tp. That must not depend on the pack, because a backward pack asks for
other ranges than were recorded. So any slice is divided to within one row, short documents do not all fall to the same
rank, and no recorded row ever moves. Korthikanti et al. 2022 cut a batch into contiguous parts, which only works when
backward has the forward's rows. O(1) a slice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.types.token_range import Range


@dataclass(frozen=True)
class RowShard:
    """Which rows a rank of a tensor-parallel group has between blocks."""

    rank: int
    size: int

    def num_rows(self, ranges: Iterable[Range]) -> int:
        return sum(self.rows_before(doc_id, stop) - self.rows_before(doc_id, start) for doc_id, start, stop in ranges)

    def rows_before(self, doc_id: int, position: int) -> int:
        """Own rows among a document's tokens `[0, position)`."""
        return (position - (self.rank - doc_id) % self.size + self.size - 1) // self.size


def row_owners(ranges: Iterable[Range], size: int) -> NDArray[np.int64]:
    """The rank that has each row of token ranges; int64[T]."""
    owners = [np.arange(start, stop, dtype=np.int64) + doc_id for doc_id, start, stop in ranges]
    return np.concatenate([*owners, np.zeros(0, np.int64)]) % size
