"""Describe sequences that share prefixes as one tree: `Segment`, and where rows, keys and positions lie (`TreeShape`).

    sequences       tree                       rows, depth first
    a b c d         [a b]─┬─[c]─┬─[d]          a b | c | d | f | e
    a b c f               │     └─[f]          0     2   3   4   5
    a b e                 └─[e]                keys that row 5 (e) sees: [0, 2) and [5, 6)

A tree is a document of its unique tokens, depth first: parents come before children and every subtree is one run of
rows. So forward slices that ascend compute ancestors first and backward slices that descend have seen all descendants,
wherever either is cut. Where the child with the most rows comes first, a row sees at most 1 + log2(rows) runs of rows.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from evenload.errors import DataError


class Segment(NamedTuple):
    """Tokens of a tree that the same sequences share, behind those of the segment `parent`; -1 = a root."""

    num_tokens: int
    parent: int


class Piece(NamedTuple):
    """Rows `[start, stop)` of a tree that lie in one segment."""

    segment: int
    start: int
    stop: int


class RowRun(NamedTuple):
    """Rows `[start, stop)` of a tree."""

    start: int
    stop: int


class TreeShape:
    """Holds where the S segments of a tree lie in its n rows.

    Args:
        segments: depth first; one root. `DataError`: an order in which a subtree is not one run of rows.

    Attributes:
        starts, stops: int64[S], rows of each segment.
        depths: int64[S], the position of a segment's first token along its path.
        parents: int64[S].
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        sizes = np.array([one.num_tokens for one in segments], np.int64)
        self.parents = np.array([one.parent for one in segments], np.int64)
        self.stops = sizes.cumsum()
        self.starts = self.stops - sizes
        depths: list[int] = []
        chain: list[int] = []
        for at, (size, parent) in enumerate(segments):
            while chain and chain[-1] != parent:
                chain.pop()
            if size < 1 or (parent == -1) != (at == 0) or (at > 0 and not chain):
                raise DataError(f"segment {at} of a tree has {size} tokens behind segment {parent}")
            depths.append(depths[parent] + segments[parent].num_tokens if at else 0)
            chain.append(at)
        self.depths = np.array(depths, np.int64)

    @property
    def num_rows(self) -> int:
        """Unique tokens."""
        return int(self.stops[-1])

    def positions(self, start: int, stop: int) -> np.ndarray:
        """Return positions along the path of rows `[start, stop)`; int64."""
        rows = np.arange(start, stop)
        segment = np.searchsorted(self.stops, rows, side="right")
        return rows - self.starts[segment] + self.depths[segment]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Divide rows `[start, stop)` by segments, in order."""
        first, last = np.searchsorted(self.stops, [start, stop - 1], side="right")
        edges = [start, *self.stops[first:last].tolist(), stop]
        return [Piece(int(first) + at, a, b) for at, (a, b) in enumerate(itertools.pairwise(edges))]

    def runs_before(self, segment: int) -> list[RowRun]:
        """Return the rows that a segment's tokens see before it, in order of the path; neighbours are one run."""
        chain = []
        while (segment := int(self.parents[segment])) >= 0:
            chain.append(RowRun(int(self.starts[segment]), int(self.stops[segment])))
        return joined(chain[::-1])

    def path_of(self, leaf: int) -> list[int]:
        """Return the segments from the root to one."""
        chain = [leaf]
        while (leaf := int(self.parents[leaf])) >= 0:
            chain.append(leaf)
        return chain[::-1]

    def rows_of_path(self, leaf: int) -> np.ndarray:
        """Return the rows of the segments from the root to one; int64."""
        return np.concatenate([np.arange(self.starts[one], self.stops[one]) for one in self.path_of(leaf)])

    def row_before(self, segment: int) -> int:
        """Return the row that predicts a segment's first token; -1 = none does."""
        parent = int(self.parents[segment])
        return int(self.stops[parent]) - 1 if parent >= 0 else -1


def joined(runs: Sequence[RowRun]) -> list[RowRun]:
    """Return runs with neighbours as one."""
    found: list[RowRun] = []
    for run in runs:
        if found and found[-1].stop == run.start:
            found[-1] = RowRun(found[-1].start, run.stop)
        elif run.stop > run.start:
            found.append(run)
    return found


@lru_cache(maxsize=4096)
def shape_of(segments: tuple[Segment, ...]) -> TreeShape:
    """Return where segments lie; kept, because every slice of a tree asks for it."""
    return TreeShape(segments)
