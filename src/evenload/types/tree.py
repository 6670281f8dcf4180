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
from functools import cached_property, lru_cache
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


class PathRange(NamedTuple):
    """Rows of a tree each of which sees the one before, the position of the first, and the rows that the last sees."""

    rows: RowRun
    position: int
    seen: list[RowRun]


class TreeShape:
    """Holds where the S segments of a tree lie in its n rows.

    Args:
        segments: depth first; one root. `DataError`: an order in which a subtree is not one run of rows.

    Attributes:
        starts, stops: int64[S], rows of each segment.
        ends: int64[S], the row behind a segment and all that descend from it.
        depths: int64[S], the position of a segment's first token along its path.
        parents: int64[S].
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        sizes = np.array([one.num_tokens for one in segments], np.int64)
        self.parents = np.array([one.parent for one in segments], np.int64)
        self.stops = sizes.cumsum()
        self.starts = self.stops - sizes
        self.depths = np.zeros(len(segments), np.int64)
        self.ends = self.stops.copy()
        chain: list[int] = []
        for at, (size, parent) in enumerate(segments):
            while chain and chain[-1] != parent:
                self.ends[chain.pop()] = self.starts[at]
            if size < 1 or (parent == -1) != (at == 0) or (at > 0 and not chain):
                raise DataError(f"segment {at} of a tree has {size} tokens behind segment {parent}")
            if at:
                self.depths[at] = self.depths[parent] + sizes[parent]
            chain.append(at)
        for at in chain:
            self.ends[at] = self.stops[-1]

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

    @cached_property
    def paths(self) -> list[list[RowRun]]:
        """The rows of every segment's path, its own included, in order; neighbours are one run."""
        found: list[list[RowRun]] = []
        for parent, start, stop in zip(*(one.tolist() for one in (self.parents, self.starts, self.stops)), strict=True):
            found.append(joined([*(found[parent] if parent >= 0 else ()), RowRun(start, stop)]))
        return found

    def runs_before(self, segment: int) -> list[RowRun]:
        """Return the rows that a segment's tokens see before it, in order of the path; neighbours are one run."""
        parent = int(self.parents[segment])
        return self.paths[parent] if parent >= 0 else []

    def path_ranges(self, start: int, stop: int) -> list[PathRange]:
        """Divide rows `[start, stop)` into ranges of one path each, in order: a segment and its first child are one, so
        there are about as many as leaves."""
        found: list[PathRange] = []
        for segment, first, behind in self.pieces(start, stop):
            position = first - int(self.starts[segment]) + int(self.depths[segment])
            seen = joined([*self.runs_before(segment), RowRun(int(self.starts[segment]), behind)])
            if found and self.parents[segment] == segment - 1:
                (first, _), position, _ = found.pop()
            found.append(PathRange(RowRun(first, behind), position, seen))
        return found

    def path_of(self, leaf: int) -> list[int]:
        """Return the segments from the root to one."""
        chain = [leaf]
        while (leaf := int(self.parents[leaf])) >= 0:
            chain.append(leaf)
        return chain[::-1]

    def rows_of_path(self, leaf: int) -> np.ndarray:
        """Return the rows of the segments from the root to one; int64."""
        return np.concatenate([np.arange(self.starts[one], self.stops[one]) for one in self.path_of(leaf)])

    def edges(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of `[start, stop)` and the rows whose tokens they predict, by the first; int64[E] each. A row
        before a branch comes once for every child."""
        inside = np.arange(start + 1, min(stop + 1, self.num_rows))
        first, behind = np.searchsorted(self.starts, [start + 1, stop + 1])
        inside = np.delete(inside, self.starts[first:behind] - start - 1)
        before = np.where(self.parents < 0, -1, self.stops[self.parents] - 1)  # the row that predicts a first token
        begun = np.flatnonzero((before >= start) & (before < stop))
        rows = np.concatenate([inside - 1, before[begun]])
        by_row = np.argsort(rows, kind="stable")
        return rows[by_row], np.concatenate([inside, self.starts[begun]])[by_row]


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
