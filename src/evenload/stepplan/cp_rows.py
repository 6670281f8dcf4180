"""Divide every pack among the ranks of a context-parallel group, for prices (`ranked_packs`) and for the runtime
(`replica_rows`).

    per_sequence   the pack as one sequence in 2·cp chunks; rank r computes chunks r and 2·cp - 1 - r. Equal tokens,
                   but documents are cut anywhere: attention is uneven.
    per_document   every slice in 2·cp chunks, of which each rank computes a symmetric pair. Equal tokens (± 1) and
                   equal attention; many short pieces waste kernel tiles. Tokens beyond a multiple of 2·cp make chunks
                   one longer, round robin over ranks through all slices of a pack (in WLB §5.1 pieces of their own).
    owners         a slice whole on its owner; those of owner -1 per document

The planner chooses the rule (`plan.cp_sharding`). A token runs backward on the rank on which it ran forward, but
backward packs are cut elsewhere: forward slices are first cut into cells at their document's backward cuts, and every
cell is divided by itself, so that both directions are even, in tokens (± 1 over a pack) and in attention;
`per_sequence` keeps its chunks. A document whole on one rank is local and needs no transfer. O(slices · cp) numpy.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.cost.pack_pricing import PerRankPacks
from evenload.errors import InvalidPlanError
from evenload.stepplan.resimulation import replica_columns
from evenload.types.columns import SliceColumns
from evenload.types.document import MicroPack, PackSharding, Range, ReplicaBlock
from evenload.types.plan import StepPlan, block_of


class RankRanges(NamedTuple):
    """Rank `rank[i]` of the group computes tokens `[start[i], stop[i])` of the document of slice `piece[i]`, at least
    one; int64[n] each."""

    rank: NDArray[np.int64]
    piece: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def joined(ranges: RankRanges) -> RankRanges:
    """Sort by slice (or document), rank and position, and join neighbours of one slice and rank: one kernel call."""
    order = np.lexsort((ranges.start, ranges.rank, ranges.piece))
    rank, piece, start, stop = (column[order] for column in ranges)
    is_new = np.ones(len(piece), bool)
    is_new[1:] = (piece[1:] != piece[:-1]) | (rank[1:] != rank[:-1]) | (start[1:] != stop[:-1])
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(piece))[: len(first)] - 1
    return RankRanges(rank[first], piece[first], start[first], stop[last])


def ranges_per_sequence(
    start: NDArray[np.int64], stop: NDArray[np.int64], pack_offset: NDArray[np.int64], cp: int
) -> RankRanges:
    """Divide every pack as one sequence among `cp` ranks, from the packs' slices, int64[k], not empty, of which pack i
    holds `[pack_offset[i], pack_offset[i + 1])`."""
    # Packs are laid end to end, so that a pack's first token is a border of a chunk.
    ends = np.cumsum(stop - start)
    pack_ends = np.concatenate([[0], ends])[pack_offset]
    chunks = _chunk_tokens(np.diff(pack_ends), np.arange(len(pack_ends)), cp)
    edges = np.concatenate([[0], np.cumsum(chunks.ravel())])
    # Every border of a chunk and of a slice starts a new range.
    borders = np.unique(np.concatenate([edges, ends]))
    low, high = borders[:-1], borders[1:]
    piece = np.searchsorted(ends, low, side="right")
    chunk = (np.searchsorted(edges, low, side="right") - 1) % (2 * cp)
    shift = start[piece] - (ends - (stop - start))[piece]
    return RankRanges(_rank_of_chunk(chunk, cp), piece, low + shift, high + shift)


def ranges_by_owner(
    start: NDArray[np.int64], stop: NDArray[np.int64], owner: NDArray[np.int64], pack_offset: NDArray[np.int64], cp: int
) -> RankRanges:
    """Give slices whole to their owner, a rank in int64[k], and divide those of owner -1 per document; other arguments
    as of `ranges_per_sequence`."""
    shared, whole = np.flatnonzero(owner < 0), np.flatnonzero(owner >= 0)
    chunks = _chunk_tokens((stop - start)[shared], np.searchsorted(shared, pack_offset), cp)
    high = start[shared][:, None] + np.cumsum(chunks, axis=1)
    used = (chunks > 0).ravel()
    return RankRanges(
        np.concatenate([np.tile(_rank_of_chunk(np.arange(2 * cp), cp), len(shared))[used], owner[whole]]),
        np.concatenate([np.repeat(shared, 2 * cp)[used], whole]),
        np.concatenate([(high - chunks).ravel()[used], start[whole]]),
        np.concatenate([high.ravel()[used], stop[whole]]),
    )


def _rank_of_chunk(chunk: NDArray[np.int64], cp: int) -> NDArray[np.int64]:
    return np.minimum(chunk, 2 * cp - 1 - chunk)


def _chunk_tokens(tokens: NDArray[np.int64], offset: NDArray[np.int64], cp: int) -> NDArray[np.int64]:
    """Return the tokens of the 2·cp chunks of every sequence, int64[k, 2·cp], of which packs hold those between
    `offset`s; over a pack ranks differ by at most one."""
    base, extra = np.divmod(tokens, 2 * cp)
    before = np.concatenate([[0], np.cumsum(extra)])
    first = before[:-1] - np.repeat(before[offset[:-1]], np.diff(offset))  # the next rank in turn
    turn = (np.arange(cp)[None, :] - first[:, None]) % cp
    once, twice = (turn < extra[:, None]).astype(np.int64), (turn + cp < extra[:, None]).astype(np.int64)
    # The early chunk is longer in one round of ranks, the late one in the next: always early would be cheap for rank 0
    # and expensive for the last, because a token that opens a tile costs by the keys that it sees.
    is_late = (first // cp % 2 == 1)[:, None]
    head = base[:, None] + np.where(is_late, twice, once)
    tail = base[:, None] + np.where(is_late, once, twice)
    return np.concatenate([head, tail[:, ::-1]], axis=1)


class _Side(NamedTuple):
    """Packs of one direction, how many ranks share each, and of every slice the pack, the document, the end with
    padding, and whether several ranks share it."""

    columns: SliceColumns
    ranks: NDArray[np.int64]
    pack: NDArray[np.int64]
    doc: NDArray[np.int64]
    stop: NDArray[np.int64]
    in_group: NDArray[np.bool_]


class _SharedRows(NamedTuple):
    """Ranges of the forward packs that groups run, cut wherever a slice of either direction begins, with the document
    of each, int64[n]; bool[documents] `is_cut`; `doc * scale + position` is one sorted key."""

    sides: tuple[_Side, _Side]
    rows: RankRanges
    doc: NDArray[np.int64]
    is_cut: NDArray[np.bool_]
    scale: int


def ranked_packs(
    forward: SliceColumns,
    backward: SliceColumns,
    shardings: Sequence[PackSharding],
    layout_cp: int,
    *,
    prefix_travels: bool = False,
) -> tuple[PerRankPacks, PerRankPacks]:
    """Divide both directions of one replica's packs among their ranks.

    Args:
        shardings: of every forward pack (`MicroPack.sharding`); only those of shared packs count.
        layout_cp: context ranks of the layout.
        prefix_travels: keys and values of a slice's prefix are sent with its own (a ring).
    """
    shared = _shared_rows(forward, backward, shardings, layout_cp)
    num_documents = len(shared.is_cut)
    lowest, highest = np.full(num_documents, np.iinfo(np.int64).max), np.full(num_documents, -1)
    np.minimum.at(lowest, shared.doc, shared.rows.rank)
    np.maximum.at(highest, shared.doc, shared.rows.rank)
    is_local = lowest == highest
    of_forward, of_backward = shared.sides
    return (
        _ranked(of_forward, joined(shared.rows), is_local, shared.is_cut, prefix_travels),
        _ranked(of_backward, joined(_backward_rows(shared)), is_local, shared.is_cut, prefix_travels),
    )


def ranked_if_shared(
    costs: PackCosts, forward: SliceColumns, backward: SliceColumns, shardings: Sequence[PackSharding]
) -> tuple[PerRankPacks, PerRankPacks] | tuple[None, None]:
    """Divide packs as `ranked_packs`, as these costs run them; None twice where no packs are shared."""
    cp = costs.layout.cp
    if cp == 1 and not (forward.cp > 1).any():
        return None, None
    ring = costs.coefficients.context_exchange == "ring"
    return ranked_packs(forward, backward, shardings, cp, prefix_travels=ring)


def _shared_rows(
    forward: SliceColumns, backward: SliceColumns, shardings: Sequence[PackSharding], layout_cp: int
) -> _SharedRows:
    sides = (_side(forward, layout_cp), _side(backward, layout_cp))
    scale = 1 + max(int(side.stop.max(initial=0)) for side in sides)
    # Where slices of either direction begin, document after document.
    edges = np.unique(np.concatenate([(side.doc * scale + side.columns.start)[side.in_group] for side in sides]))
    num_documents = 1 + max(int(side.doc.max(initial=-1)) for side in sides)
    is_cut = np.bincount(edges // scale, minlength=num_documents) > 1
    rows = _forward_rows(sides[0], shardings, edges, scale)
    return _SharedRows(sides, rows, sides[0].doc[rows.piece], is_cut, scale)


def _side(columns: SliceColumns, layout_cp: int) -> _Side:
    pack, ranks = columns.pack_of_slice(), np.maximum(layout_cp, columns.pack_ranks())  # more under DP-Merge
    stop = columns.start + columns.slice_tokens()
    return _Side(columns, ranks, pack, columns.doc.astype(np.int64), stop, (ranks > 1)[pack])


def _forward_rows(side: _Side, shardings: Sequence[PackSharding], edges: NDArray[np.int64], scale: int) -> RankRanges:
    """Return the ranges of all packs that groups run; slices that no rank has whole are cut at `edges`."""
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
                base = side.doc[pieces] * scale
                first = np.searchsorted(edges, base + start, side="right")
                inside = np.searchsorted(edges, base + stop) - first
                inside[owner[pieces] >= 0] = 0
                cell = np.repeat(np.arange(len(pieces)), inside + 1)
                place = np.arange(len(cell)) - np.repeat(np.cumsum(inside + 1) - (inside + 1), inside + 1)
                cut = edges[np.minimum(first[cell] + place - 1, len(edges) - 1)] - base[cell]
                low = np.where(place == 0, start[cell], cut)
                high = np.where(place == inside[cell], stop[cell], np.roll(low, -1))
                of_piece = pieces[cell]
                offset = _offset(side.pack[of_piece], packs)
                ranges = ranges_by_owner(low, high, owner[of_piece], offset, size)
            parts.append(ranges._replace(piece=of_piece[ranges.piece]))
    if not parts:
        return RankRanges(*np.zeros((4, 0), np.int64))
    return RankRanges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _offset(pack: NDArray[np.int64], packs: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.searchsorted(pack, packs), [len(pack)]])


def _backward_rows(shared: _SharedRows) -> RankRanges:
    """Return the same ranges by backward slices, cut where those begin."""
    side, rows, base = shared.sides[1], shared.rows, shared.doc * shared.scale
    pieces, keys = np.flatnonzero(side.in_group), side.doc * shared.scale + side.columns.start
    pieces = pieces[np.argsort(keys[pieces])]
    first = np.searchsorted(keys[pieces], base + rows.start, side="right") - 1
    count = np.searchsorted(keys[pieces], base + rows.stop) - first
    of_row = np.repeat(np.arange(len(first)), count)
    place = np.arange(len(of_row)) - np.repeat(np.cumsum(count) - count, count)
    piece = pieces[first[of_row] + place]
    start = np.maximum(rows.start[of_row], side.columns.start[piece])
    return RankRanges(rows.rank[of_row], piece, start, np.minimum(rows.stop[of_row], side.stop[piece]))


def _ranked(
    side: _Side, rows: RankRanges, is_local: NDArray[np.bool_], is_cut: NDArray[np.bool_], prefix_travels: bool
) -> PerRankPacks:
    columns = side.columns
    first_rank = np.concatenate([[0], np.cumsum(side.ranks)])
    alone = np.flatnonzero(~side.in_group)
    pack = np.concatenate([first_rank[side.pack[rows.piece]] + rows.rank, first_rank[side.pack[alone]]])
    order = np.argsort(pack, kind="stable")
    num_packs = int(first_rank[-1])
    pad_to = np.zeros(num_packs, np.int64)
    pad_to[first_rank[:-1]] = np.where(side.ranks > 1, 0, columns.pad_to)
    ranged = SliceColumns(
        doc=np.concatenate([columns.doc[rows.piece], columns.doc[alone]])[order],
        start=np.concatenate([rows.start, columns.start[alone]])[order],
        stop=np.concatenate([rows.stop, columns.stop[alone]])[order],
        pack_offset=np.concatenate([[0], np.cumsum(np.bincount(pack, minlength=num_packs))]),
        pad_to=pad_to,
        cp=np.ones(len(order), np.int64),
    )
    sent = side.stop if prefix_travels else side.stop - columns.start
    sent = np.where(side.in_group & ~is_local[columns.doc], sent, 0)
    whole, cut = (columns.pack_sums(np.where(is_cut[columns.doc] == of_cut, sent, 0)) for of_cut in (False, True))
    return PerRankPacks(ranged, first_rank, is_local[ranged.doc], is_cut[ranged.doc], whole, cut)


_START, _STOP = attrgetter("start"), attrgetter("stop")


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Which tokens of a document, padding included, every rank of the group has, as ascending ranges; and whether it is
    cut, forward or backward, into slices of several packs."""

    doc_id: int
    num_tokens: int
    is_cut: bool
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def home(self) -> int | None:
        """The rank that has the whole document; None where several share it."""
        having = [rank for rank, ranges in enumerate(self.ranges) if ranges]
        return having[0] if len(having) == 1 else None

    def rows_before(self, rank: int, position: int) -> int:
        """Count the rows of a rank at positions below `position`."""
        return sum(min(stop, position) - start for _, start, stop in self.ranges[rank] if start < position)

    def within(self, start: int, stop: int) -> tuple[tuple[Range, ...], ...]:
        """Return the tokens of every rank among `[start, stop)`, ascending, neighbours joined."""
        return tuple(
            tuple(
                Range(self.doc_id, max(own.start, start), min(own.stop, stop))
                for own in ranges[bisect_right(ranges, start, key=_STOP) : bisect_left(ranges, stop, key=_START)]
            )
            for ranges in self.ranges
        )


@dataclass(frozen=True, eq=False)
class SharedSlice:
    """A slice of a document that several ranks share; `ranges` are the tokens of each rank, ascending."""

    document: DocumentRows
    start: int
    stop: int
    ranges: tuple[tuple[Range, ...], ...]


@dataclass(frozen=True, eq=False)
class PackRows:
    """One pack of a block of replicas: slices whose keys and values are exchanged, those of documents that are never
    cut first, and slices of documents that every rank has whole."""

    block: ReplicaBlock
    shared: tuple[SharedSlice, ...]
    local: tuple[tuple[Range, ...], ...]

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Return what a rank computes, in row order: shared slices, then local ones."""
        return (*(own for piece in self.shared for own in piece.ranges[rank]), *self.local[rank])

    def held(self, rank: int) -> tuple[Range, ...]:
        """Return the whole slices of the documents of which a rank has rows."""
        shared = [Range(piece.document.doc_id, piece.start, piece.stop) for piece in self.shared]
        return (*shared, *self.local[rank])


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """All packs of one replica, None where its own rank runs the pack alone; and the documents of the others."""

    forward: tuple[PackRows | None, ...]
    backward: tuple[PackRows | None, ...]
    documents: dict[int, DocumentRows]

    def of_pack(self, pack: MicroPack) -> PackRows | None:
        return (self.forward if pack.direction == "forward" else self.backward)[pack.index]


def replica_rows(plan: StepPlan, dp_rank: int) -> ReplicaRows:
    """Return the rows of every pack of a replica; `InvalidPlanError` where the sharding of a shared pack does not say
    which rank computes what."""
    packs, cp = plan.pack_plans[dp_rank], plan.layout.cp
    for pack in packs.forward:
        _require_owners(plan, pack, block_of(plan, dp_rank, pack).size * cp)
    columns = replica_columns(plan, dp_rank)
    shared = _shared_rows(columns.forward, columns.backward, columns.shardings, cp)
    rows, side = shared.rows, shared.sides[0]
    sizes = dict(zip(shared.doc.tolist(), side.ranks[side.pack[rows.piece]].tolist(), strict=True))
    ranges: dict[int, list[list[Range]]] = {doc: [[] for _ in range(size)] for doc, size in sizes.items()}
    for rank, doc, start, stop in zip(*map(np.ndarray.tolist, joined(rows._replace(piece=shared.doc))), strict=True):
        ranges[doc][rank].append(Range(plan.documents[doc].doc_id, start, stop))
    documents: dict[int, DocumentRows] = {}
    for doc, of_ranks in ranges.items():
        doc_id, num_tokens = plan.documents[doc].doc_id, max(own[-1].stop for own in of_ranks if own)
        documents[doc_id] = DocumentRows(doc_id, num_tokens, bool(shared.is_cut[doc]), tuple(map(tuple, of_ranks)))
    forward, backward = (
        tuple(
            _pack_rows(pack, documents, block, block.size * cp) if block.size * cp > 1 else None
            for pack in listed
            for block in (block_of(plan, dp_rank, pack),)
        )
        for listed in (packs.forward, packs.backward)
    )
    return ReplicaRows(forward, backward, documents)


def _pack_rows(pack: MicroPack, documents: dict[int, DocumentRows], block: ReplicaBlock, ranks: int) -> PackRows:
    shared: list[SharedSlice] = []
    local: list[list[Range]] = [[] for _ in range(ranks)]
    for piece in pack.slices:
        start, stop, document = piece.start, pack.pad_to or piece.stop, documents[piece.doc_id]
        if document.home is None:
            shared.append(SharedSlice(document, start, stop, document.within(start, stop)))
        else:
            local[document.home].append(Range(piece.doc_id, start, stop))
    shared.sort(key=lambda piece: piece.document.is_cut)
    return PackRows(block, tuple(shared), tuple(map(tuple, local)))


def _require_owners(plan: StepPlan, pack: MicroPack, ranks: int) -> None:
    if ranks == 1:
        return
    where = f"step {plan.step}: {pack.direction} pack {pack.index}"
    if isinstance(pack.sharding, tuple):
        owner = np.array(pack.sharding, np.int64)
        if len(owner) != len(pack.slices) or not -1 <= owner.min(initial=-1) <= owner.max(initial=-1) < ranks:
            raise InvalidPlanError(
                f"{where}: owners {pack.sharding} do not give each of {len(pack.slices)} slices one of {ranks} ranks "
                "or -1"
            )
        return
    alone = next((piece for piece in pack.slices if piece.cp == 1), None)
    if alone is not None:
        raise InvalidPlanError(
            f"{where}: one of {ranks} ranks computes document {alone.doc_id} whole, but sharding '{pack.sharding}' "
            "does not say which"
        )
    if pack.sharding not in ("per_document", "per_sequence"):
        raise InvalidPlanError(
            f"{where} is shared by {ranks} ranks and has sharding '{pack.sharding}'; choose per_sequence, per_document "
            "or the owner of every slice"
        )
