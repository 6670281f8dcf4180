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


class TreePart(NamedTuple):
    """Holds a run of a tree's leaves and all that is on their paths: a tree of its own.

    Args:
        segments: of the part; its largest child need not come first.
        rows: int64[n], where its rows lie in the whole tree, ascending.
        num_recomputed: the first so many rows are in a part before it, too, which has their labels.
        own: the segments of the whole tree that no part before it has.
        num_path_tokens: of its sequences.
    """

    segments: tuple[Segment, ...]
    rows: np.ndarray
    num_recomputed: int
    own: range
    num_path_tokens: int


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

    @cached_property
    def leaves(self) -> np.ndarray:
        """Return the segments without children, ascending; int64[L]."""
        return np.setdiff1d(np.arange(len(self.parents)), self.parents)

    def leaf_sums(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum values of segments over the path to every leaf, and over the segments of it that are on no path to a
        leaf before; [L] each."""
        paths = values.copy()
        for at, parent in enumerate(self.parents[1:].tolist(), start=1):
            paths[at] += paths[parent]
        return paths[self.leaves], np.diff(values.cumsum()[self.leaves], prepend=0)

    def parts(self, cuts: Sequence[int], num_path_tokens: int) -> list[TreePart]:
        """Return the tree in parts: the first from leaf 0 on, each other one from one of the ascending `cuts` on.

        Of all sequences' tokens, `num_path_tokens`, those that are on no path to a leaf of its own (a sequence ends on
        the way, or comes twice) are the first part's.
        """
        behind = [0, *(self.leaves + 1).tolist()]
        edges = itertools.pairwise([0, *cuts, len(self.leaves)])
        first, *others = (self._part(self.leaves[a:b], range(behind[a], behind[b])) for a, b in edges)
        of_first = num_path_tokens - sum(one.num_path_tokens for one in others)
        return [first._replace(num_path_tokens=of_first), *others]

    def _part(self, leaves: np.ndarray, own: range) -> TreePart:
        again = [one for one in self.path_of(int(leaves[0])) if one < own.start]
        members = [*again, *own]
        place = {-1: -1} | {one: at for at, one in enumerate(members)}
        rows = [np.arange(self.starts[one], self.stops[one]) for one in members]
        return TreePart(
            segments=tuple(
                Segment(len(at), place[int(self.parents[one])]) for one, at in zip(members, rows, strict=True)
            ),
            rows=np.concatenate(rows),
            num_recomputed=sum(len(at) for at in rows[: len(again)]),
            own=own,
            num_path_tokens=int((self.depths + self.stops - self.starts)[leaves].sum()),
        )

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
