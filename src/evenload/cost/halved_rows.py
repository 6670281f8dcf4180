"""Where packs are cut into two halves that take turns, and packs in halves as packs.

A cut is near the middle of a pack's rows, because transfers are even in rows: between slices where that is near enough,
else in a slice, at a whole number of attention's tiles, also of every chunk in which ranks share it. Positions are
tokens of the whole pack, slice after slice, padding included: ranks that share a pack share either half evenly,
whatever is cut where (`stepplan.rank_rows`). O(slices) numpy.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.types.columns import SliceColumns

_NEAR = 8
"""A cut between slices is taken where it is within so small a part of the pack's rows from its middle."""


class Halves(NamedTuple):
    """Packs, of which some are in halves, which are packs here.

    Args:
        columns: the packs and halves; halves are without padding, which their rows have already.
        pack: int64[packs of `columns`], which pack each is, or is half of.
        piece: int64[slices of `columns`], which slice of the packs each is, or is a part of.
    """

    columns: SliceColumns
    pack: NDArray[np.int64]
    piece: NDArray[np.int64]


def in_halves(packs: SliceColumns, first_rows: NDArray[np.int64]) -> Halves:
    """Packs in halves where they have first rows.

    Args:
        first_rows: int64[num_packs]; 0 = in one go.
    """
    rows, of_slice = packs.slice_tokens(), packs.pack_of_slice()
    is_halved = first_rows > 0
    stop = np.where(is_halved[of_slice], packs.start + rows, packs.stop)
    edge = np.clip(packs.start + first_rows[of_slice] - rows_before(packs), packs.start, stop)
    edge = np.where(is_halved[of_slice], edge, stop)
    starts, stops = np.stack([packs.start, edge], axis=1), np.stack([edge, stop], axis=1)
    first = np.cumsum(1 + is_halved) - (1 + is_halved)
    place = (first[of_slice][:, None] + np.array([0, 1])).ravel()
    used = np.flatnonzero((stops > starts).ravel())
    kept = used[np.argsort(place[used], kind="stable")]
    pack = np.repeat(np.arange(packs.num_packs), 1 + is_halved)
    count = np.bincount(place[kept], minlength=len(pack))
    columns = SliceColumns(
        doc=packs.doc[kept // 2],
        start=starts.ravel()[kept],
        stop=stops.ravel()[kept],
        pack_offset=np.concatenate([[0], np.cumsum(count)]).astype(np.int64),
        pad_to=np.where(is_halved, 0, packs.pad_to)[pack],
        cp=packs.cp[kept // 2],
    )
    return Halves(columns, pack, kept // 2)


def rows_before(packs: SliceColumns) -> NDArray[np.int64]:
    """Of every slice, those of its pack before it; int64[num_slices]."""
    rows = packs.slice_tokens()
    before = np.concatenate([[0], np.cumsum(rows)])
    return before[:-1] - np.repeat(before[packs.pack_offset[:-1]], np.diff(packs.pack_offset))


def middles(columns: SliceColumns, tile: int, *, causal: bool) -> NDArray[np.int64]:
    """Where every pack would be halved; 0 = nowhere. int64[num_packs].

    Args:
        tile: query rows of one attention block. Of a shared pack every rank gets two chunks of a slice.
        causal: documents may be cut.
    """
    rows, ranks = columns.slice_tokens(), columns.pack_ranks()
    ends = np.cumsum(rows)
    found = np.zeros(columns.num_packs, np.int64)
    for pack, (first, stop) in enumerate(zip(columns.pack_offset[:-1], columns.pack_offset[1:], strict=True)):
        if first == stop:
            continue
        before = int(ends[first] - rows[first])
        total = int(ends[stop - 1]) - before
        middle = total // 2
        at = first + int(np.searchsorted(ends[first:stop] - before, middle, side="right"))
        edges = [int(ends[i]) - before for i in (at - 1, at) if first <= i < stop - 1]
        nearest = min(edges, key=lambda edge: abs(2 * edge - total), default=0)
        if nearest and _NEAR * abs(2 * nearest - total) <= 2 * total:
            found[pack] = nearest
        elif causal and at < stop:
            start = int(ends[at] - rows[at]) - before
            step = tile if ranks[pack] == 1 else 2 * int(ranks[pack]) * tile
            found[pack] = start + (middle - start) // step * step
        else:
            found[pack] = nearest
    return found
