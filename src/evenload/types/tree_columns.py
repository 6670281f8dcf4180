"""Hold the segments of documents as flat columns, by which a step's trees are priced and cut (`TreeColumns`).

A row of a tree sees the keys of its path. So what depends on the tokens before a slice is a sum over its pieces, one
for every segment that it has rows in: a piece costs what a slice of a plain document costs at the same positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.types.columns import SliceColumns, offsets_of
from evenload.types.document import Document
from evenload.types.tree import shape_of


@dataclass(frozen=True, eq=False)
class TreeColumns:
    """Hold where the S segments of n documents lie; a plain document has none.

    Args:
        offset: int64[n + 1]; document d has segments `[offset[d], offset[d + 1])`. [0] where no document is a tree.
        start, stop: int64[S], the rows of every segment in its document.
        depth: int64[S], the position of its first row along its path.
    """

    offset: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    depth: NDArray[np.int64]

    @classmethod
    def of(cls, documents: Sequence[Document]) -> "TreeColumns":
        """Collect the segments of documents."""
        if not any(document.segments for document in documents):
            return NO_TREES
        shapes = [shape_of(document.segments) for document in documents if document.segments]
        return cls(
            offset=offsets_of([len(document.segments) for document in documents]),
            start=np.concatenate([shape.starts for shape in shapes]),
            stop=np.concatenate([shape.stops for shape in shapes]),
            depth=np.concatenate([shape.depths for shape in shapes]),
        )

    @property
    def has_any(self) -> bool:
        """Whether any document is a tree."""
        return len(self.start) > 0

    @property
    def depth_stop(self) -> NDArray[np.int64]:
        """Return the position behind every segment's last row; int64[S]."""
        return self.depth + self.stop - self.start

    @property
    def is_tree(self) -> NDArray[np.bool_]:
        """Return which documents are trees; bool[n]."""
        return np.diff(self.offset) > 0

    def sums(self, values: NDArray) -> NDArray[np.float64]:
        """Sum a value of segments over each document; float64[n]."""
        document = np.repeat(np.arange(len(self.offset) - 1), np.diff(self.offset))
        return np.bincount(document, values, len(self.offset) - 1).astype(np.float64, copy=False)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the columns for the core."""
        return self.offset, self.start, self.depth

    def taken(self, documents: NDArray[np.int64]) -> "TreeColumns":
        """Take documents by index."""
        if not self.has_any:
            return self
        counts = np.diff(self.offset)[documents]
        offset = offsets_of(counts)
        if not offset[-1]:
            return NO_TREES
        segment = np.arange(offset[-1]) + np.repeat(self.offset[documents] - offset[:-1], counts)
        return TreeColumns(offset, self.start[segment], self.stop[segment], self.depth[segment])

    def pieces(self, slices: SliceColumns) -> SliceColumns:
        """Return slices by pieces, in order, each as the range of its positions along the path."""
        if not self.has_any:
            return slices
        is_tree = self.is_tree[slices.doc]
        span = 1 + max(int(slices.stop.max(initial=0)), int(self.start.max()))
        first_rows = np.repeat(np.arange(len(self.offset) - 1), np.diff(self.offset)) * span + self.start
        own = slices.doc.astype(np.int64) * span
        first = np.searchsorted(first_rows, own + slices.start, side="right") - 1
        behind = np.searchsorted(first_rows, own + slices.stop - 1, side="right")
        counts = np.where(is_tree, behind - first, 1)
        edges = offsets_of(counts)
        index = np.repeat(np.arange(slices.num_slices), counts)
        segment = np.arange(edges[-1]) - edges[index] + first[index]
        start = np.maximum(slices.start[index], np.where(is_tree[index], self.start[segment], 0))
        stop = np.minimum(slices.stop[index], np.where(is_tree[index], self.stop[segment], span))
        shift = np.where(is_tree[index], self.depth[segment] - self.start[segment], 0)
        return SliceColumns(
            doc=slices.doc[index],
            start=start + shift,
            stop=stop + shift,
            pack_offset=edges[slices.pack_offset],
            pad_to=slices.pad_to,
            cp=slices.cp[index],
        )


NO_TREES = TreeColumns(np.zeros(1, np.int64), *(np.empty(0, np.int64) for _ in range(3)))
"""Of plain documents, however many."""


def lengths_of(documents: Sequence[Document]) -> tuple[NDArray[np.int64], TreeColumns]:
    """Return the tokens of documents, int64[n], and their segments, as prices take them."""
    return np.array([document.num_tokens for document in documents], np.int64), TreeColumns.of(documents)
