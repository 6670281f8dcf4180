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


class RowRun(NamedTuple):
    """Rows `[start, stop)` of a tree."""

    start: int
    stop: int


class PathRange(NamedTuple):
    """Rows of a tree each of which sees the one before, the position of the first, and the rows that the last sees."""

    rows: RowRun
    position: int
    seen: list[RowRun]


class TreePart(NamedTuple):
    """Holds a run of a tree's leaves and all that is on their paths: a tree of its own.

    Args:
        segments: of the part; its largest child need not come first.
        rows: int64[n], where its rows lie in the whole tree, ascending.
        num_recomputed: the first so many rows are in a part before it, too, which has their labels.
        own: the segments of the whole tree that no part before it has.
        path_lengths: tokens of the path to each of its leaves.
    """

    segments: tuple[Segment, ...]
    rows: np.ndarray
    num_recomputed: int
    own: range
    path_lengths: tuple[int, ...]


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

    @cached_property
    def paths(self) -> list[list[RowRun]]:
        """The rows of every segment's path, its own included, in order; neighbours are one run."""
        found: list[list[RowRun]] = []
        for parent, start, stop in zip(*(one.tolist() for one in (self.parents, self.starts, self.stops)), strict=True):
            before = found[parent] if parent >= 0 else []
            if before and before[-1].stop == start:
                found.append([*before[:-1], RowRun(before[-1].start, stop)])
            else:
                found.append([*before, RowRun(start, stop)])
        return found

    def path_ranges(self, start: int, stop: int) -> list[PathRange]:
        """Divide rows `[start, stop)` into ranges of one path each, in order: a segment and its first child are one, so
        there are about as many as leaves."""
        found: list[PathRange] = []
        first, last = np.searchsorted(self.stops, [start, stop - 1], side="right").tolist()
        for segment in range(first, last + 1):
            row, behind = max(start, int(self.starts[segment])), min(stop, int(self.stops[segment]))
            position = row - int(self.starts[segment]) + int(self.depths[segment])
            *before, (begin, _) = self.paths[segment]
            if found and self.parents[segment] == segment - 1:
                (row, _), position, _ = found.pop()
            found.append(PathRange(RowRun(row, behind), position, [*before, RowRun(begin, behind)]))
        return found

    def rows_of_path(self, leaf: int) -> np.ndarray:
        """Return the rows of the segments from the root to one; int64."""
        return np.concatenate([np.arange(*run) for run in self.paths[leaf]])

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

    @cached_property
    def leaves(self) -> np.ndarray:
        """Return the segments without children, ascending; int64[L]."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    def cuts_within(self, most_rows: int) -> list[int]:
        """Return where parts of at most so many rows begin, each as long as it goes; one leaf alone may have more."""
        cuts, size = [], 0
        for leaf, ((start, stop), position, _) in enumerate(self.path_ranges(0, self.num_rows)):  # one for every leaf
            size += stop - start
            if size > most_rows and leaf:
                cuts.append(leaf)
                size = position + stop - start
        return cuts

    def parts(self, cuts: Sequence[int]) -> list[TreePart]:
        """Return the tree in parts: the first from leaf 0 on, each other one from one of the ascending `cuts` on. A
        sequence that ends on the way to a leaf, or comes twice, is the first part's."""
        behind = [0, *(self.leaves + 1).tolist()]
        edges = itertools.pairwise([0, *cuts, len(self.leaves)])
        return [self._part(self.leaves[a:b], range(behind[a], behind[b])) for a, b in edges]

    def _part(self, leaves: np.ndarray, own: range) -> TreePart:
        members, above = list(own), int(self.parents[own.start])
        while above >= 0:
            members.insert(0, above)
            above = int(self.parents[above])
        place = {-1: -1} | {one: at for at, one in enumerate(members)}
        rows = [np.arange(self.starts[one], self.stops[one]) for one in members]
        parents = [place[one] for one in self.parents[members].tolist()]
        return TreePart(
            segments=tuple(map(Segment, map(len, rows), parents)),
            rows=np.concatenate(rows),
            num_recomputed=sum(map(len, rows[: -len(own)])),
            own=own,
            path_lengths=tuple((self.depths + self.stops - self.starts)[leaves].tolist()),
        )


@lru_cache(maxsize=4096)
def shape_of(segments: tuple[Segment, ...]) -> TreeShape:
    """Return where segments lie; kept, because every slice of a tree asks for it."""
    return TreeShape(segments)
