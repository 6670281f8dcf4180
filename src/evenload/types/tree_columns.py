"""Hold trees as flat columns, by which a step is priced and cut (`TreeColumns`).

A row of a tree sees the keys of its path, and a segment's first child follows it in rows and on the path: they are one
range, as is what follows in the same way. What depends on the tokens before a slice is a sum over its pieces, one for
every range that it has rows in, as attention computes them (`runtime.replay.tree_attention`): a piece costs what a
slice of a plain document costs at the same positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.errors import DataError
from evenload.types.columns import SliceColumns, offsets_of
from evenload.types.document import Document
from evenload.types.tree import Segment


@dataclass(frozen=True, eq=False)
class TreeColumns:
    """Hold where the ranges of n documents lie among the R of a step; a plain document is one range.

    Args:
        first, count: int64[n]; document d has ranges `[first[d], first[d] + count[d])`. Empty where no document of the
            step is a tree.
        start: int64[R + 1], the first row of every range, rows counted through all documents of the step; and the row
            behind the last.
        depth: int64[R], the position of a range's first row along its path.
    """

    first: NDArray[np.int64]
    count: NDArray[np.int64]
    start: NDArray[np.int64]
    depth: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "TreeColumns":
        """Collect the ranges of documents; raise a `DataError` where the segments of one are not depth first."""
        if not any(document.segments for document in documents):
            return NO_TREES
        trees = [document.segments or (Segment(document.num_tokens, -1),) for document in documents]
        try:
            return cls(*_native.tree_columns(trees))
        except ValueError as error:
            raise DataError(str(error)) from None

    @property
    def has_any(self) -> bool:
        """Whether any document of the step is a tree."""
        return len(self.first) > 0

    @property
    def depth_stop(self) -> NDArray[np.int64]:
        """Return the position behind every range's last row; int64[R]."""
        return self.depth + np.diff(self.start)

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum values of ranges, float64[R, ...], over each document; float64[n, ...]."""
        edges = np.stack([self.first, self.first + self.count], axis=1).ravel()
        return np.add.reduceat(np.concatenate([values, values[:1]]), edges)[::2]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the columns for the core."""
        return self.first, self.count, self.start, self.depth

    def taken(self, documents: NDArray[np.int64]) -> "TreeColumns":
        """Take documents by index."""
        if not self.has_any:
            return self
        return TreeColumns(self.first[documents], self.count[documents], self.start, self.depth)

    def pieces(self, slices: SliceColumns) -> SliceColumns:
        """Return slices by pieces, in order, each as the range of its positions along the path."""
        if not self.has_any:
            return slices
        row = self.start[self.first[slices.doc]]
        start, stop = row + slices.start, row + slices.stop
        first = np.searchsorted(self.start, start, side="right") - 1
        counts = np.searchsorted(self.start, stop) - first
        edges = offsets_of(counts)
        index = np.repeat(np.arange(slices.num_slices), counts)
        ranges = np.arange(edges[-1]) + (first - edges[:-1])[index]
        shift = self.depth[ranges] - self.start[ranges]
        return SliceColumns(
            doc=slices.doc[index],
            start=np.maximum(start[index], self.start[ranges]) + shift,
            stop=np.minimum(stop[index], self.start[ranges + 1]) + shift,
            pack_offset=edges[slices.pack_offset],
            pad_to=slices.pad_to,
            cp=slices.cp[index],
        )


NO_TREES = TreeColumns(*(np.empty(0, np.int64) for _ in range(4)))
"""Of plain documents, however many."""


def lengths_of(documents: Sequence[Document]) -> tuple[NDArray[np.int64], TreeColumns]:
    """Return the tokens of documents, int64[n], and their ranges, as prices take them."""
    return np.array([document.num_tokens for document in documents], np.int64), TreeColumns.of(documents)
