"""Halving one pack of a finished partition: the move that tapers the ends of a pipeline, whose fill costs (P - 1)
forwards of the first pack and whose drain (P - 1) backwards of the last one. Slices of a pack belong to different
documents, so a cut between them keeps every order. O(slices).
"""

import itertools

import numpy as np

from evenload.types.columns import SliceColumns, WorkCurve
from evenload.types.tree_columns import NO_TREES, TreeColumns
from reference.chain_free import work_below
from reference.slice_work import rows_work_s


def halve_pack(
    columns: SliceColumns,
    pack: int,
    curve: WorkCurve,
    *,
    backward: bool,
    min_slice_tokens: int,
    may_cut: bool,
    trees: TreeColumns = NO_TREES,
) -> SliceColumns | None:
    """The same packs with `pack` in two of nearly equal work of one direction (`backward`: later tokens of a document
    first), cut between slices or, if it `may_cut`, inside one; None where it cannot be divided."""
    rows = list(zip(columns.doc.tolist(), columns.start.tolist(), columns.stop.tolist(), strict=True))
    packs = [rows[lo:hi] for lo, hi in itertools.pairwise(columns.pack_offset.tolist())]
    own = packs[pack]
    if len(own) >= 2:
        doc, start, stop = np.array(own, np.int64).T
        done = np.cumsum(work_below((curve,), stop, trees, doc) - work_below((curve,), start, trees, doc))
        at = 1 + int(np.abs(done[:-1] - done[-1] / 2).argmin())
        halves = [own[:at], own[at:]]
    else:
        [(doc, first, last)] = own
        if not may_cut or last - first < 2 * min_slice_tokens:
            return None
        cut = _half(curve, trees, doc, first, last, min_slice_tokens)
        halves = [[(doc, first, cut)], [(doc, cut, last)]]
        if backward:
            halves.reverse()
    return SliceColumns.from_ranges([*packs[:pack], *halves, *packs[pack + 1 :]])


def _half(curve: WorkCurve, trees: TreeColumns, document: int, start: int, stop: int, min_slice_tokens: int) -> int:
    """The token at which half of the slice's work is done, both pieces legal."""
    target = (rows_work_s(curve, trees, document, 0, start) + rows_work_s(curve, trees, document, 0, stop)) / 2
    low, high = start + min_slice_tokens, stop - min_slice_tokens
    while low < high:
        middle = (low + high) // 2
        if rows_work_s(curve, trees, document, 0, middle) >= target:
            high = middle
        else:
            low = middle + 1
    return low
