"""Shared packs as the rows of each of their ranks, for prices: `stepplan.rank_rows` in columns.

The same rules and the same rows (tests/stepplan/test_ranked_packs.py compares them), for columns of a candidate before
it is a plan, and for all packs of a replica in some numpy calls. O(n log n) in the ranges.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_split import RankedPacks
from evenload.stepplan.rank_ranges import RankRanges, joined, ranges_by_owner, ranges_per_sequence
from evenload.types.columns import SliceColumns
from evenload.types.micropack import PackSharding


class _Rows(NamedTuple):
    """Token ranges: the slice that each lies in, the rank of the group that has it, its document; int64[n] each."""

    piece: NDArray[np.int64]
    rank: NDArray[np.int64]
    doc: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


class _Side(NamedTuple):
    """One direction: its packs, who runs them together, and where slices end with padding."""

    columns: SliceColumns
    ranks: NDArray[np.int64]
    pack: NDArray[np.int64]
    stop: NDArray[np.int64]
    in_group: NDArray[np.bool_]


def ranked_packs(
    forward: SliceColumns,
    backward: SliceColumns,
    shardings: Sequence[PackSharding],
    layout_cp: int,
    *,
    prefix_travels: bool = False,
) -> tuple[RankedPacks, RankedPacks]:
    """Both directions of one replica's packs, rank by rank.

    Args:
        shardings: of every forward pack (`MicroPack.sharding`); of packs that nobody shares it does not count.
        layout_cp: context ranks of the layout.
        prefix_travels: with a slice's keys and values go those of its prefix (a ring).
    """
    sides = [_side(columns, layout_cp) for columns in (forward, backward)]
    scale = 1 + max(int(side.stop.max(initial=0)) for side in sides)
    # Where slices of either direction begin; documents beside each other.
    edges = np.unique(
        np.concatenate([(side.columns.doc * np.int64(scale) + side.columns.start)[side.in_group] for side in sides])
    )
    rows = _forward_rows(sides[0], shardings, edges, scale)
    num_documents = 1 + max(int(columns.doc.max(initial=-1)) for columns in (forward, backward))
    lowest, highest = np.full(num_documents, np.iinfo(np.int64).max), np.full(num_documents, -1)
    np.minimum.at(lowest, rows.doc, rows.rank)
    np.maximum.at(highest, rows.doc, rows.rank)
    is_cut = np.bincount(edges // scale, minlength=num_documents) > 1
    found = [
        _ranked(side, _joined(of_side, side.columns.doc), lowest == highest, is_cut, prefix_travels)
        for side, of_side in zip(sides, (rows, _within(sides[1], rows, scale)), strict=True)
    ]
    return found[0], found[1]


def ranked_where_shared(
    costs: PackCosts, forward: SliceColumns, backward: SliceColumns, shardings: Sequence[PackSharding]
) -> tuple[RankedPacks, RankedPacks] | tuple[None, None]:
    """As `ranked_packs`, as these costs run them; None twice where no packs are shared."""
    cp = costs.layout.cp
    if cp == 1 and not (forward.cp > 1).any():
        return None, None
    ring = costs.coefficients.context_exchange == "ring"
    return ranked_packs(forward, backward, shardings, cp, prefix_travels=ring)


def _side(columns: SliceColumns, layout_cp: int) -> _Side:
    pack, ranks = columns.pack_of_slice(), np.maximum(layout_cp, columns.pack_ranks())  # more under DP-Merge
    return _Side(columns, ranks, pack, columns.start + columns.slice_tokens(), (ranks > 1)[pack])


def _forward_rows(side: _Side, shardings: Sequence[PackSharding], edges: NDArray[np.int64], scale: int) -> _Rows:
    """Rows of all packs that groups run, cut wherever a slice of either direction begins but where a rank has all."""
    columns, parts = side.columns, []
    is_sequence = np.array([sharding == "per_sequence" for sharding in shardings], bool)
    owner = np.full(columns.num_slices, -1)
    for pack, sharding in enumerate(shardings):
        if isinstance(sharding, tuple):
            owner[columns.pack_offset[pack] : columns.pack_offset[pack + 1]] = sharding
    for size in np.unique(side.ranks[side.ranks > 1]).tolist():
        for by_sequence in (True, False):
            packs = np.flatnonzero((side.ranks == size) & (is_sequence == by_sequence))
            pieces = np.flatnonzero(np.isin(side.pack, packs))
            if not len(pieces):
                continue
            start, stop = columns.start[pieces], side.stop[pieces]
            if by_sequence:
                of_piece, ranges = pieces, ranges_per_sequence(start, stop, _offset(side.pack[pieces], packs), size)
            else:
                base = columns.doc[pieces] * np.int64(scale)
                first = np.searchsorted(edges, base + start, side="right")
                inside = np.searchsorted(edges, base + stop) - first
                inside[owner[pieces] >= 0] = 0
                cell = np.repeat(np.arange(len(pieces)), inside + 1)
                place = np.arange(len(cell)) - np.repeat(np.cumsum(inside + 1) - (inside + 1), inside + 1)
                low = np.where(
                    place == 0, start[cell], edges[np.minimum(first[cell] + place - 1, len(edges) - 1)] - base[cell]
                )
                high = np.where(place == inside[cell], stop[cell], np.roll(low, -1))
                of_piece = pieces[cell]
                offset = _offset(side.pack[of_piece], packs)
                ranges = ranges_by_owner(low, high, owner[of_piece], offset, size)
            parts.append(_rows_of(ranges, of_piece, columns.doc))
    if not parts:
        return _Rows(*(np.zeros(0, np.int64) for _ in _Rows._fields))
    return _Rows(*(np.concatenate(of_parts) for of_parts in zip(*parts, strict=True)))


def _rows_of(ranges: RankRanges, of_piece: NDArray[np.int64], doc: NDArray[np.int32]) -> _Rows:
    piece = of_piece[ranges.piece]
    return _Rows(piece, ranges.rank, doc[piece].astype(np.int64), ranges.start, ranges.stop)


def _joined(rows: _Rows, doc: NDArray[np.int32]) -> _Rows:
    return _rows_of(joined(RankRanges(rows.rank, rows.piece, rows.start, rows.stop)), np.arange(len(doc)), doc)


def _offset(pack: NDArray[np.int64], packs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of some packs begins among slices that lie in them, in the order of packs."""
    return np.concatenate([np.searchsorted(pack, packs), [len(pack)]])


def _within(side: _Side, rows: _Rows, scale: int) -> _Rows:
    """The same rows by the slices of the other direction, cut where those begin."""
    columns, pieces = side.columns, np.flatnonzero(side.in_group)
    pieces = pieces[np.argsort(columns.doc[pieces] * np.int64(scale) + columns.start[pieces])]
    keys = columns.doc[pieces] * np.int64(scale) + columns.start[pieces]
    first = np.searchsorted(keys, rows.doc * scale + rows.start, side="right") - 1
    count = np.searchsorted(keys, rows.doc * scale + rows.stop) - first
    of_row = np.repeat(np.arange(len(first)), count)
    place = np.arange(len(of_row)) - np.repeat(np.cumsum(count) - count, count)
    piece = pieces[first[of_row] + place]
    return _Rows(
        piece,
        rows.rank[of_row],
        rows.doc[of_row],
        np.maximum(rows.start[of_row], columns.start[piece]),
        np.minimum(rows.stop[of_row], side.stop[piece]),
    )


def _ranked(
    side: _Side, rows: _Rows, is_local: NDArray[np.bool_], is_cut: NDArray[np.bool_], prefix_travels: bool
) -> RankedPacks:
    columns = side.columns
    first_rank = np.concatenate([[0], np.cumsum(side.ranks)])
    alone = np.flatnonzero(~side.in_group)
    pack = np.concatenate([first_rank[side.pack[rows.piece]] + rows.rank, first_rank[side.pack[alone]]])
    order = np.argsort(pack, kind="stable")
    num_packs = int(first_rank[-1])
    pad_to = np.zeros(num_packs, np.int64)
    pad_to[first_rank[:-1]] = np.where(side.ranks > 1, 0, columns.pad_to)
    ranged = SliceColumns(
        doc=np.concatenate([rows.doc.astype(np.int32), columns.doc[alone]])[order],
        start=np.concatenate([rows.start, columns.start[alone]])[order],
        stop=np.concatenate([rows.stop, columns.stop[alone]])[order],
        pack_offset=np.concatenate([[0], np.cumsum(np.bincount(pack, minlength=num_packs))]),
        pad_to=pad_to,
        cp=np.ones(len(order), np.int64),
    )
    sent = side.stop if prefix_travels else side.stop - columns.start
    sent = np.where(side.in_group & ~is_local[columns.doc], sent, 0)
    whole, cut = (columns.pack_sums(np.where(is_cut[columns.doc] == of_cut, sent, 0)) for of_cut in (False, True))
    return RankedPacks(ranged, first_rank, is_local[ranged.doc], is_cut[ranged.doc], whole, cut)
