"""Say where trees of shared prefixes are cut, so that replicas have equal work (`tree_cuts`).

A part of a tree is a run of its leaves (`types.tree.TreeShape.parts`); a cut recomputes what the paths to the leaves on
both of its sides share. For a limit of seconds, documents go to the replica with the least work, trees after the
others; a tree that exceeds what is left there is cut where it is full, and its rest goes on to the next. Bisection
finds the least limit that holds all. Of what it tries, whole documents among it, that is taken whose fullest replica
has least to do when parts are dealt longest first, as plans deal documents. Price: O(n log n) a limit, n documents, and
little where whole documents are even.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.planning.packing import longest_first
from evenload.types.document import Document, parts_of
from evenload.types.tree import shape_of
from evenload.types.tree_columns import TreeColumns, lengths_of

GAIN = 1.01  # Fullest over mean replica that is even enough, and what cuts must gain to be worth it
HALVINGS = 12


class _Part(NamedTuple):
    """Leaves `[start, stop)` of a document."""

    document: int
    start: int
    stop: int


class _Leaves(NamedTuple):
    """Seconds of a document by leaves, of which a plain one has one: of the path to each, and of all new segments up to
    and with each; float64[L]."""

    alone_s: NDArray[np.float64]
    done_s: NDArray[np.float64]

    def run_s(self, start: int, stop: int) -> float:
        return float(self.alone_s[start] + self.done_s[stop - 1] - self.done_s[start])

    def fitting(self, start: int, room_s: float) -> int:
        """Return where the longest run from `start` on ends that takes at most so long; `start` = there is none."""
        most_s = room_s - self.alone_s[start] + self.done_s[start]
        return max(start, int(np.searchsorted(self.done_s, most_s, side="right")))


def tree_cuts(documents: Sequence[Document], costs: PackCosts) -> dict[int, list[int]]:
    """Return by doc_id where trees are cut for the replicas of `costs`, as `TreeShape.parts` takes it."""
    dp, (lengths, trees) = costs.layout.dp, lengths_of(documents)
    if dp == 1 or not trees.has_any:
        return {}
    whole_s = costs.document_seconds(lengths, trees=trees)
    low_s, high_s = float(whole_s.sum()) / dp, _fullest(whole_s, dp)
    if high_s <= GAIN * low_s:
        return {}
    # What cannot be cut comes first: trees then fill up what is left.
    leaves, order = _leaves_of(trees, costs), np.lexsort((-whole_s, trees.count > 1)).tolist()
    best_s, best = high_s / GAIN, list[_Part]()
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        parts = _parts_within(leaves, order, dp, middle_s)
        if parts is None:
            low_s = middle_s
            continue
        high_s = middle_s
        fullest_s = _fullest(np.array([leaves[one.document].run_s(one.start, one.stop) for one in parts]), dp)
        if fullest_s < best_s:
            best_s, best = fullest_s, parts
    cuts: dict[int, list[int]] = {}
    for one in best:
        if one.start:
            cuts.setdefault(documents[one.document].doc_id, []).append(one.start)
    return cuts


def in_parts(documents: Sequence[Document], costs: PackCosts) -> tuple[Document, ...]:
    """Return documents with trees in parts as `tree_cuts` says, every token of which is a label."""
    cuts = tree_cuts(documents, costs)
    made: list[Document] = []
    for one in documents:
        labels = [segment.num_tokens for segment in one.segments]
        parts = shape_of(one.segments).parts(cuts[one.doc_id]) if one.doc_id in cuts else ()
        made += parts_of(one, parts, labels) or [one]
    return tuple(made)


def _leaves_of(trees: TreeColumns, costs: PackCosts) -> list[_Leaves]:
    """Return those of every document; the ranges of its columns are of one leaf each."""
    ends = trees.depth_stop
    alone_s, new_s = costs.piece_seconds(np.zeros_like(ends), ends), costs.piece_seconds(trees.depth, ends)
    ranges = [slice(first, first + count) for first, count in zip(trees.first, trees.count, strict=True)]
    return [_Leaves(alone_s[own], new_s[own].cumsum()) for own in ranges]


def _fullest(seconds: NDArray[np.float64], dp: int) -> float:
    return max(float(seconds[members].sum()) for members in longest_first(seconds, dp))


def _parts_within(leaves: Sequence[_Leaves], order: Sequence[int], dp: int, most_s: float) -> list[_Part] | None:
    """Return parts, those of a document in order, with which no replica gets more than `most_s`; None where none were
    found."""
    loads, parts = [0.0] * dp, list[_Part]()
    for at in order:
        start, one = 0, leaves[at]
        while start < len(one.alone_s):
            stop = one.fitting(start, most_s - loads[0])
            if stop == start:
                return None
            parts.append(_Part(at, start, stop))
            heapq.heapreplace(loads, loads[0] + one.run_s(start, stop))
            start = stop
    return parts
