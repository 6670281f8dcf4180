"""Which rows of every pack each rank of a context-parallel group computes, in both directions.

`rank_ranges` shares one pack. A document's tokens must stay on one rank from forward to backward, because that
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
from numpy.typing import NDArray

from evenload.errors import InvalidPlanError
from evenload.stepplan.rank_ranges import ranges_by_owner, ranges_per_sequence
from evenload.stepplan.validate_groups import block_of
from evenload.types.micropack import MicroPack
from evenload.types.plan import StepPlan
from evenload.types.replica_block import ReplicaBlock
from evenload.types.token_range import Range


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Where a document's tokens lie.

    Args:
        num_tokens: padding included.
        is_cut: in forward or backward, into slices of several packs.
        owners: (start, stop, rank) of all its tokens, ascending.
        ranges: per rank of the group its tokens, ascending.
    """

    doc_id: int
    num_tokens: int
    is_cut: bool
    owners: tuple[tuple[int, int, int], ...]
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def home(self) -> int | None:
        """The rank that has all of it, None where several have some."""
        having = [rank for rank, ranges in enumerate(self.ranges) if ranges]
        return having[0] if len(having) == 1 else None

    def rows_before(self, rank: int, position: int) -> int:
        """Rows of a rank at positions below `position`."""
        return sum(min(stop, position) - start for _, start, stop in self.ranges[rank] if start < position)

    def within(self, start: int, stop: int) -> tuple[tuple[Range, ...], ...]:
        """Per rank its tokens among `[start, stop)`, ascending, neighbours joined."""
        found: list[list[Range]] = [[] for _ in self.ranges]
        for low, high, rank in self.owners[bisect.bisect_left(self.owners, (start + 1,)) - 1 :]:
            if low >= stop:
                break
            _append(found[rank], Range(self.doc_id, max(low, start), min(high, stop)))
        return tuple(map(tuple, found))


def _append(ranges: list[Range], following: Range) -> None:
    """Add the next tokens of a document, joined to the last ones where they touch."""
    if ranges and ranges[-1].stop == following.start:
        ranges[-1] = ranges[-1]._replace(stop=following.stop)
    else:
        ranges.append(following)


@dataclass(frozen=True, eq=False)
class SharedSlice:
    """A slice of a document that several ranks have rows of; `ranges` are the tokens of each rank, ascending."""

    document: DocumentRows
    start: int
    stop: int
    ranges: tuple[tuple[Range, ...], ...]


@dataclass(frozen=True, eq=False)
class PackRows:
    """One pack of a group.

    Args:
        block: the replicas that run it.
        shared: slices whose keys and values travel; those of documents that are never cut first.
        local: per rank the slices of documents that lie whole on it.
    """

    block: ReplicaBlock
    shared: tuple[SharedSlice, ...]
    local: tuple[tuple[Range, ...], ...]

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """What a rank computes, in row order: shared slices, then local ones."""
        return (*(own for piece in self.shared for own in piece.ranges[rank]), *self.local[rank])

    def held(self, rank: int) -> tuple[Range, ...]:
        """Slices, whole, of the documents that a rank holds something of."""
        shared = [Range(piece.document.doc_id, piece.start, piece.stop) for piece in self.shared]
        return (*shared, *self.local[rank])


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """All packs of one replica, None where its own rank runs the pack alone; documents of those that groups run."""

    forward: tuple[PackRows | None, ...]
    backward: tuple[PackRows | None, ...]
    documents: dict[int, DocumentRows]

    def of_pack(self, pack: MicroPack) -> PackRows | None:
        return (self.forward if pack.direction == "forward" else self.backward)[pack.index]


def replica_rows(plan: StepPlan, dp_rank: int) -> ReplicaRows:
    """Rows of every pack of a replica."""
    packs, cp = plan.pack_plans[dp_rank], plan.layout.cp
    blocks = [
        [
            (block, block.size * cp) if block.size * cp > 1 else None
            for block in (block_of(plan, dp_rank, p) for p in listed)
        ]
        for listed in (packs.forward, packs.backward)
    ]
    starts: dict[int, set[int]] = defaultdict(set)
    sizes: dict[int, int] = {}
    for listed, groups in zip((packs.forward, packs.backward), blocks, strict=True):
        for pack, group in zip(listed, groups, strict=True):
            if group is None:
                continue
            for doc_id, start, _ in _whole_slices(pack):
                starts[doc_id].add(start)
                sizes[doc_id] = group[1]
    owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for pack, group in zip(packs.forward, blocks[0], strict=True):
        if group is None:
            continue
        owner, slices = _owners(plan, pack, group[1]), _whole_slices(pack)
        for rank, piece, start, stop in _pieces(pack, slices, owner, group[1], starts):
            owners[slices[piece].doc_id].append((start, stop, rank))
    documents = {
        doc_id: _document_rows(doc_id, sorted(owned), sizes[doc_id], is_cut=len(starts[doc_id]) > 1)
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


def shared_documents(lengths: Sequence[int], ranks: int) -> PackRows:
    """A pack of whole documents, each of which all ranks share per document, of no plan: for whoever times one.

    Args:
        lengths: tokens of every document, numbered from 0.
    """
    stop = np.array(lengths, np.int64)
    found = ranges_by_owner(np.zeros_like(stop), stop, np.full(len(stop), -1), np.array([0, len(stop)]), ranks)
    owners: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for doc_id, *owned in zip(
        found.piece.tolist(), found.start.tolist(), found.stop.tolist(), found.rank.tolist(), strict=True
    ):
        owners[doc_id].append((owned[0], owned[1], owned[2]))
    documents = {doc_id: _document_rows(doc_id, sorted(owned), ranks, is_cut=False) for doc_id, owned in owners.items()}
    slices = [Range(doc_id, 0, tokens) for doc_id, tokens in enumerate(lengths)]
    return _pack_rows(slices, documents, ReplicaBlock(0, 1), ranks)


def _document_rows(doc_id: int, owners: list[tuple[int, int, int]], ranks: int, *, is_cut: bool) -> DocumentRows:
    ranges: list[list[Range]] = [[] for _ in range(ranks)]
    for start, stop, rank in owners:
        _append(ranges[rank], Range(doc_id, start, stop))
    return DocumentRows(doc_id, owners[-1][1], is_cut, tuple(owners), tuple(map(tuple, ranges)))


def _whole_slices(pack: MicroPack) -> list[Range]:
    return [Range(piece.doc_id, piece.start, pack.pad_to or piece.stop) for piece in pack.slices]


def _pack_rows(
    slices: Sequence[Range], documents: dict[int, DocumentRows], block: ReplicaBlock, ranks: int
) -> PackRows:
    shared: list[SharedSlice] = []
    local: list[list[Range]] = [[] for _ in range(ranks)]
    for doc_id, start, stop in slices:
        document = documents[doc_id]
        home = document.home
        if home is None:
            shared.append(SharedSlice(document, start, stop, document.within(start, stop)))
        else:
            local[home].append(Range(doc_id, start, stop))
    shared.sort(key=lambda piece: piece.document.is_cut)
    return PackRows(block, tuple(shared), tuple(map(tuple, local)))


def _pieces(
    pack: MicroPack, slices: Sequence[Range], owner: NDArray[np.int64], ranks: int, starts: dict[int, set[int]]
) -> Iterable[tuple[int, int, int, int]]:
    """(rank, slice, start, stop) of a forward pack that has these slices."""
    if pack.sharding == "per_sequence":
        start, stop = (np.array([piece[side] for piece in slices], np.int64) for side in (1, 2))
        found = ranges_per_sequence(start, stop, np.array([0, len(slices)]), ranks)
        return zip(found.rank.tolist(), found.piece.tolist(), found.start.tolist(), found.stop.tolist(), strict=True)
    cells = [
        (index, low, high)
        for index, (doc_id, start, stop) in enumerate(slices)
        for low, high in itertools.pairwise(
            [start, *(sorted(edge for edge in starts[doc_id] if start < edge < stop) if owner[index] < 0 else ()), stop]
        )
    ]
    of_slice, low, high = (np.array(column, np.int64) for column in zip(*cells, strict=True))
    found = ranges_by_owner(low, high, owner[of_slice], np.array([0, len(cells)]), ranks)
    piece = of_slice[found.piece]
    return zip(found.rank.tolist(), piece.tolist(), found.start.tolist(), found.stop.tolist(), strict=True)


def _owners(plan: StepPlan, pack: MicroPack, ranks: int) -> NDArray[np.int64]:
    """Owner of every slice, -1 = all ranks; int64[slices]. An `InvalidPlanError` where the sharding does not say."""
    where = f"step {plan.step}: {pack.direction} pack {pack.index}"
    if isinstance(pack.sharding, tuple):
        owner = np.array(pack.sharding, np.int64)
        if len(owner) != len(pack.slices) or not -1 <= owner.min(initial=-1) <= owner.max(initial=-1) < ranks:
            raise InvalidPlanError(
                f"{where}: owners {pack.sharding} do not give each of {len(pack.slices)} slices one of {ranks} ranks "
                "or -1"
            )
        return owner
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
    return np.full(len(pack.slices), -1)
