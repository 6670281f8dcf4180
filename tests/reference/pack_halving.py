"""Halving one pack of a finished partition: the move that tapers the ends of a pipeline.

The fill of a pipeline costs (P - 1) forwards of the first pack, the drain (P - 1) backwards of the last one, so
smaller packs there pay although every pack costs a constant. Any pack may be halved: its
slices belong to different documents, so a cut between them keeps every order, and a slice cut inside gives two
that follow each other forward and precede each other backward. O(slices).
"""

import numpy as np
from numpy.typing import NDArray

from evenload.types.columns import SliceColumns, WorkCurve
from reference.chain_free import work_below
from reference.slice_work import slice_work_s


def halve_pack(
    columns: SliceColumns, pack: int, curve: WorkCurve, *, backward: bool, min_slice_tokens: int, may_cut: bool
) -> SliceColumns | None:
    """The same packs with `pack` in two of nearly equal work; None where it cannot be divided.

    Args:
        curve: work of the direction.
        backward: later tokens of a document come first.
        may_cut: slices may be cut; else only between slices.
    """
    lo, hi = int(columns.pack_offset[pack]), int(columns.pack_offset[pack + 1])
    start, stop = columns.start[lo:hi], columns.stop[lo:hi]
    work = work_below((curve,), stop) - work_below((curve,), start)
    if hi - lo >= 2:
        done = np.cumsum(work)
        at = lo + 1 + int(np.abs(done[:-1] - done[-1] / 2).argmin())
        return _replace(columns, np.insert(columns.pack_offset, pack + 1, at), columns.doc, columns.start, columns.stop)
    first, last = int(start[0]), int(stop[0])
    if not may_cut or last - first < 2 * min_slice_tokens:
        return None
    cut = _half(curve, first, last, min_slice_tokens)
    pieces = [(first, cut), (cut, last)]
    if backward:
        pieces.reverse()
    offset = np.concatenate([columns.pack_offset[: pack + 1], [lo + 1], columns.pack_offset[pack + 1 :] + 1])
    return _replace(
        columns,
        offset,
        np.insert(columns.doc, lo, columns.doc[lo]),
        np.concatenate([columns.start[:lo], [piece[0] for piece in pieces], columns.start[hi:]]),
        np.concatenate([columns.stop[:lo], [piece[1] for piece in pieces], columns.stop[hi:]]),
    )


def _half(curve: WorkCurve, start: int, stop: int, min_slice_tokens: int) -> int:
    """The token at which half of the slice's work is done, both pieces legal."""
    target = (slice_work_s(curve, 0, start) + slice_work_s(curve, 0, stop)) / 2
    low, high = start + min_slice_tokens, stop - min_slice_tokens
    while low < high:
        middle = (low + high) // 2
        if slice_work_s(curve, 0, middle) >= target:
            high = middle
        else:
            low = middle + 1
    return low


def _replace(
    columns: SliceColumns,
    pack_offset: NDArray[np.int64],
    doc: NDArray[np.int32],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
) -> SliceColumns:
    return SliceColumns(
        doc=doc.astype(np.int32),
        start=start.astype(np.int64),
        stop=stop.astype(np.int64),
        pack_offset=pack_offset.astype(np.int64),
        pad_to=np.zeros(len(pack_offset) - 1, np.int64),
        cp=np.ones(len(doc), np.int64),
    )
