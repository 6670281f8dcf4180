"""Which rows of every pack each rank of a context-parallel group computes, in both directions (DESIGN §5, §8).

`plan.cp_sharding` shares one pack. A document's tokens must stay on one rank from forward to backward, because that
rank holds what their forward recorded, but backward packs are cut elsewhere. So the forward packs decide, and a slice
is first cut into *cells* at its document's backward cuts; every cell goes to the ranks by its own 2·cp chunks:

    forward slices   |-------------------|--------------|
    backward slices  |-----------|----------------------|
    cells            |-----------|-------|--------------|    each: rank 0 1 .. cp-1 cp-1 .. 1 0

Slices of both directions are unions of cells, so both are even, in tokens (± 1 over all cells of a pack) and in
attention. Where both directions have the same cuts, cells are slices. `per_sequence` keeps its chunks as they are; a
backward pack with other cuts is then as uneven as it falls.

A document that lies whole on one rank is *local*: it needs no transfer. WLB and Skrull never cut documents; SlimPack
cuts those that its DP-Merge shares, but does not say who computes which rows.

Pure data, the same on every member of a group. O(slices · cp) a replica.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from evenload.cost.owned_bytes import OWNED
from evenload.errors import InvalidPlanError
from evenload.plan.cp_sharding import Sharding, ShardingCost, shard_pack
from evenload.plan.validate_groups import Block, block_of
from evenload.types.micropack import MicroPack
from evenload.types.plan import StepPlan
from evenload.types.work import WorkCurve

Span = tuple[int, int]
"""Tokens [start, stop) of a document."""
_UNPRICED = ShardingCost(WorkCurve(linear_s=1.0, attention_s=(), slice_s=0.0))
"""For rules that do not ask for seconds."""
_PRICED_RULES = ("adaptive", "mixed")


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Where a document's tokens lie.

    Args:
        num_tokens: padding included.
        is_cut: in forward or backward.
        owners: (start, stop, rank) of all its tokens, ascending.
        spans: per rank of the group its tokens, ascending.
    """

    doc_id: int
    num_tokens: int
    is_cut: bool
    owners: tuple[tuple[int, int, int], ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def home(self) -> int | None:
        """The rank that has all of it, None where several have some."""
        having = [rank for rank, spans in enumerate(self.spans) if spans]
        return having[0] if len(having) == 1 else None

    def rows_before(self, rank: int, position: int) -> int:
        """Rows of a rank at positions below `position`."""
        return sum(min(stop, position) - start for start, stop in self.spans[rank] if start < position)

    def within(self, start: int, stop: int) -> tuple[tuple[Span, ...], ...]:
        """Per rank its tokens among `[start, stop)`, ascending, neighbours joined."""
        found: list[list[Span]] = [[] for _ in self.spans]
        for low, high, rank in self.owners[bisect.bisect_left(self.owners, (start + 1,)) - 1 :]:
            if low >= stop:
                break
            _append(found[rank], max(low, start), min(high, stop))
        return tuple(map(tuple, found))


def _append(spans: list[Span], start: int, stop: int) -> None:
    """Add the next tokens, joined to the last ones where they touch."""
    if spans and spans[-1][1] == start:
        spans[-1] = (spans[-1][0], stop)
    else:
        spans.append((start, stop))


@dataclass(frozen=True, eq=False)
class SharedSlice:
    """A slice of a document that several ranks have rows of.

    Args:
        spans: per rank its tokens of the slice, ascending.
    """

    document: DocumentRows
    start: int
    stop: int
    spans: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True, eq=False)
class PackRows:
    """One pack of a group.

    Args:
        block: the replicas that run it, (first, number).
        shared: slices whose keys and values travel; those of documents that are never cut first.
        local: per rank the slices of documents that lie whole on it, as (doc_id, start, stop).
    """

    block: Block
    shared: tuple[SharedSlice, ...]
    local: tuple[tuple[tuple[int, int, int], ...], ...]

    def ranges(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """What a rank computes as (doc_id, start, stop), in row order: shared slices, then local ones."""
        shared = [(piece.document.doc_id, *span) for piece in self.shared for span in piece.spans[rank]]
        return (*shared, *self.local[rank])

    def held(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Slices, whole, of the documents that a rank holds something of."""
        shared = [(piece.document.doc_id, piece.start, piece.stop) for piece in self.shared]
        return (*shared, *self.local[rank])

    def num_rows(self, rank: int) -> int:
        """Rows a rank computes."""
        return sum(stop - start for _, start, stop in self.ranges(rank))


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """All packs of one replica; None where the replica's own rank runs the pack alone.

    Args:
        documents: of the packs that groups run.
    """

    forward: tuple[PackRows | None, ...]
    backward: tuple[PackRows | None, ...]
    documents: dict[int, DocumentRows]

    def of_pack(self, pack: MicroPack) -> PackRows | None:
        """The pack's rows."""
        return (self.forward if pack.direction == "forward" else self.backward)[pack.index]


def replica_rows(plan: StepPlan, dp_rank: int, cost: ShardingCost | None = None) -> ReplicaRows:
    """Rows of every pack of a replica.

    Args:
        cost: for packs with sharding `adaptive` or `mixed`, which the plan leaves to predicted seconds; the same on
            every rank.

    Raises:
        InvalidPlanError: a sharding that is unknown, lacks `cost`, or does not fit its slices.
    """
    packs, cp = plan.pack_plans[dp_rank], plan.layout.cp
    blocks = [
        [
            (block, block[1] * cp) if block[1] * cp > 1 else None
            for block in (block_of(plan, dp_rank, p) for p in listed)
        ]
        for listed in (packs.forward, packs.backward)
    ]
    edges: dict[int, set[int]] = defaultdict(set)
    for pack, group in zip(packs.backward, blocks[1], strict=True):
        if group is not None:
            for doc_id, start, _ in _whole_slices(pack):
                edges[doc_id].add(start)
    owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    sizes: dict[int, int] = {}
    for pack, group in zip(packs.forward, blocks[0], strict=True):
        if group is None:
            continue
        slices = _whole_slices(pack)
        for doc_id, start, _ in slices:
            edges[doc_id].add(start)  # so that a document with more than one edge is cut in either direction
            sizes[doc_id] = group[1]
        for rank, piece, start, stop in _pieces(plan, pack, slices, group[1], edges, cost):
            owners[slices[piece][0]].append((start, stop, rank))
    documents = {
        doc_id: _document_rows(doc_id, sorted(owned), sizes[doc_id], is_cut=len(edges[doc_id]) > 1)
        for doc_id, owned in owners.items()
    }
    forward, backward = (
        tuple(
            None if group is None else _pack_rows(_whole_slices(pack), documents, *group)
            for pack, group in zip(listed, groups, strict=True)
        )
        for listed, groups in zip((packs.forward, packs.backward), blocks, strict=True)
    )
    return ReplicaRows(forward, backward, documents)


def _document_rows(doc_id: int, owners: list[tuple[int, int, int]], ranks: int, *, is_cut: bool) -> DocumentRows:
    spans: list[list[Span]] = [[] for _ in range(ranks)]
    for start, stop, rank in owners:
        _append(spans[rank], start, stop)
    return DocumentRows(doc_id, owners[-1][1], is_cut, tuple(owners), tuple(map(tuple, spans)))


def _whole_slices(pack: MicroPack) -> list[tuple[int, int, int]]:
    return [(piece.doc_id, piece.start, pack.pad_to or piece.stop) for piece in pack.slices]


def _pack_rows(
    slices: Sequence[tuple[int, int, int]], documents: dict[int, DocumentRows], block: Block, ranks: int
) -> PackRows:
    shared: list[SharedSlice] = []
    local: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for doc_id, start, stop in slices:
        document = documents[doc_id]
        home = document.home
        if home is None:
            shared.append(SharedSlice(document, start, stop, document.within(start, stop)))
        else:
            local[home].append((doc_id, start, stop))
    shared.sort(key=lambda piece: piece.document.is_cut)
    return PackRows(block, tuple(shared), tuple(map(tuple, local)))


def _pieces(
    plan: StepPlan,
    pack: MicroPack,
    slices: Sequence[tuple[int, int, int]],
    ranks: int,
    edges: dict[int, set[int]],
    cost: ShardingCost | None,
) -> Iterable[tuple[int, int, int, int]]:
    """(rank, slice, start, stop) of a forward pack."""
    where = f"step {plan.step}: {pack.direction} pack {pack.index}"
    start, stop = (np.array([piece[side] for piece in slices], np.int64) for side in (1, 2))
    owner = _given_owners(where, pack, ranks)
    if owner is None:
        rule = pack.sharding
        if rule in _PRICED_RULES and cost is None:
            raise InvalidPlanError(
                f"{where} has sharding '{rule}', which is chosen by predicted seconds; give the executor a "
                "ShardingCost, or plan per_document, per_sequence or owners"
            )
        if rule not in (*_PRICED_RULES, "per_document", "per_sequence"):
            raise InvalidPlanError(
                f"{where} is shared by {ranks} ranks and has sharding '{rule}'; "
                "choose per_sequence, per_document, adaptive, mixed or dacp with the owner of every slice"
            )
        found = shard_pack(rule, start, stop, ranks, cost or _UNPRICED)
        inner = any(start < edge < stop for doc_id, start, stop in slices for edge in edges[doc_id])
        if rule == "per_sequence" or not inner:
            return _rows_of(found)
        owner = _owners_of(found, len(slices))
    cells = [
        (index, low, high)
        for index, (doc_id, start, stop) in enumerate(slices)
        for low, high in itertools.pairwise(
            [start, *(sorted(edge for edge in edges[doc_id] if start < edge < stop) if owner[index] < 0 else ()), stop]
        )
    ]
    of_slice, low, high = (np.array(column, np.int64) for column in zip(*cells, strict=True))
    dealt = shard_pack("dacp", low, high, ranks, _UNPRICED, owner[of_slice])
    return zip(
        dealt.rank.tolist(), of_slice[dealt.piece].tolist(), dealt.start.tolist(), dealt.stop.tolist(), strict=True
    )


def _given_owners(where: str, pack: MicroPack, ranks: int) -> np.ndarray | None:
    """Owner of every slice where the plan names them."""
    if not pack.sharding.startswith(OWNED):
        alone = next((piece for piece in pack.slices if piece.cp == 1), None)
        if alone is not None:
            raise InvalidPlanError(
                f"{where}: one of {ranks} ranks computes document {alone.doc_id} whole, but sharding "
                f"'{pack.sharding}' does not say which"
            )
        return None
    names = pack.sharding.removeprefix(OWNED).split(",")
    owner = np.array([int(name) for name in names if name], np.int64)
    if len(owner) != len(pack.slices) or (len(owner) and not -1 <= owner.min() <= owner.max() < ranks):
        raise InvalidPlanError(
            f"{where}: sharding '{pack.sharding}' does not give each of {len(pack.slices)} slices one of "
            f"{ranks} ranks or -1"
        )
    return owner


def _rows_of(found: Sharding) -> Iterable[tuple[int, int, int, int]]:
    return zip(found.rank.tolist(), found.piece.tolist(), found.start.tolist(), found.stop.tolist(), strict=True)


def _owners_of(found: Sharding, num_slices: int) -> np.ndarray:
    """The rank that has all pieces of a slice, -1 where several have some."""
    low, high = np.full(num_slices, np.iinfo(np.int64).max), np.full(num_slices, -1)
    np.minimum.at(low, found.piece, found.rank)
    np.maximum.at(high, found.piece, found.rank)
    return np.where(low == high, high, -1)
