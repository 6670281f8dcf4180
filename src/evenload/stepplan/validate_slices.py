"""`slice_offences`: what `validate_plan` checks about packs and slices, on whole columns.

All slices of a plan are read into one table, and an invariant is a few numpy operations over it; rows that break one
are named. 1 µs a slice, most of it to read the objects; O(n log n) for n slices. `tests/reference/slice_offences.py`
asks the same of one slice after the other.
"""

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.stepplan.validate_groups import group_offences
from evenload.types.micropack import MicroPack
from evenload.types.plan import StepPlan


class _Pack(NamedTuple):
    """A pack, and the place at which the plan lists it."""

    dp_rank: int
    direction: str
    index: int
    pack: MicroPack

    def __str__(self) -> str:
        return f"replica {self.dp_rank} {self.direction} pack {self.index}"


class _Table:
    """All slices: replica after replica, forward before backward, pack after pack; int64[n] but `inside`, bool[n].

    `doc_id`, `start`, `stop`, `cp` are theirs. `pack` is an index into `packs`; `row` that of the document in the plan,
    -1 where it has none; `inside` says whether the document has such tokens.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.packs = [
            _Pack(dp_rank, direction, index, pack)
            for dp_rank, packs in enumerate(plan.pack_plans)
            for direction, listed in (("forward", packs.forward), ("backward", packs.backward))
            for index, pack in enumerate(listed)
        ]
        pieces = [piece for one in self.packs for piece in one.pack.slices]
        self.doc_id, self.start, self.stop, self.cp = (
            np.fromiter(map(attrgetter(name), pieces), np.int64, len(pieces))
            for name in ("doc_id", "start", "stop", "cp")
        )
        self.pack = np.repeat(np.arange(len(self.packs)), [len(one.pack.slices) for one in self.packs] or 0)
        row_of = {document.doc_id: row for row, document in enumerate(plan.documents)}
        self.row = np.fromiter((row_of.get(doc_id, -1) for doc_id in self.doc_id.tolist()), np.int64, len(pieces))
        self.lengths = np.array([document.num_tokens for document in plan.documents], np.int64)
        self.length = np.append(self.lengths, 0)[self.row]
        self.inside = (self.start >= 0) & (self.start < self.stop) & (self.stop <= self.length)

    def of_pack(self, values: Iterable[int]) -> NDArray[np.int64]:
        """A value of every pack, for each of its slices; int64[n]."""
        return np.fromiter(values, np.int64, len(self.packs))[self.pack]

    def tokens(self, at: int) -> str:
        return f"[{self.start[at]}, {self.stop[at]})"


def slice_offences(plan: StepPlan, max_pack_tokens: int | None) -> Iterator[str]:
    """Offences of packs, slices, their order, groups and coverage, in words; there is one pack plan a replica."""
    table = _Table(plan)
    yield from _pack_offences(table, max_pack_tokens)
    yield from _order_offences(table)
    dp = len(plan.pack_plans)
    homes = np.unique(table.row * dp + table.of_pack(one.dp_rank for one in table.packs)) // dp
    if (homes[1:] == homes[:-1]).any() or not np.isin(table.cp, (1, plan.layout.cp)).all():
        yield from group_offences(plan)
    yield from _coverage_offences(plan, table)


def _pack_offences(table: _Table, max_pack_tokens: int | None) -> Iterator[str]:
    tokens = np.bincount(table.pack, weights=table.stop - table.start, minlength=len(table.packs)).astype(np.int64)
    for one, num_tokens in zip(table.packs, tokens.tolist(), strict=True):
        pack = one.pack
        if pack.index != one.index or pack.direction != one.direction:
            yield f"{one} calls itself {pack.direction} pack {pack.index}"
        if not pack.slices:
            yield f"{one} is empty"
        computed = pack.pad_to * len(pack.slices) if pack.pad_to else num_tokens
        if max_pack_tokens is not None and computed > max_pack_tokens:
            yield f"{one} has {computed} tokens, limit {max_pack_tokens}"
    pad_to = table.of_pack(one.pack.pad_to for one in table.packs)
    is_padded_wrong = (pad_to > 0) & ((table.stop - table.start != table.length) | (table.length > pad_to))
    for at in np.flatnonzero(~table.inside | is_padded_wrong).tolist():
        where, doc_id = table.packs[table.pack[at]], table.doc_id[at]
        if table.row[at] < 0:
            yield f"{where} holds document {doc_id}, which is not in the step"
        elif not table.inside[at]:
            yield f"{where}: range {table.tokens(at)} of document {doc_id} is not in [0, {table.length[at]})"
        else:
            yield f"{where} pads to {pad_to[at]} but holds {table.tokens(at)} of document {doc_id}"


def _order_offences(table: _Table) -> Iterator[str]:
    # By document, replica and direction, in the order in which they run.
    lane = table.of_pack(2 * one.dp_rank + (one.direction == "backward") for one in table.packs)
    order = np.lexsort((lane, table.doc_id))
    doc_id, lane = table.doc_id[order], lane[order]
    is_next = (doc_id[1:] == doc_id[:-1]) & (lane[1:] == lane[:-1])
    before, after = order[:-1][is_next], order[1:][is_next]
    for at in after[table.pack[before] == table.pack[after]].tolist():
        yield f"{table.packs[table.pack[at]]} holds two slices of document {table.doc_id[at]}"
    falls, rises = table.start[after] < table.stop[before], table.stop[after] > table.start[before]
    for at in after[np.where(lane[1:][is_next] % 2, rises, falls)].tolist():
        dp_rank, direction, index, _ = table.packs[table.pack[at]]
        verb = "ascend" if direction == "forward" else "descend"
        yield (
            f"replica {dp_rank}: {direction} slices of document {table.doc_id[at]} do not {verb} at "
            f"{table.tokens(at)} in pack {index}"
        )
    # The packs in which documents begin. Those that start forward in the same one may start backward in any order.
    first = np.flatnonzero(np.concatenate([[True], ~is_next])[: len(order)])
    forward, backward = first[:-1], first[1:]
    is_pair = (doc_id[forward] == doc_id[backward]) & (lane[forward] // 2 == lane[backward] // 2)
    doc_id, forward, backward = doc_id[forward[is_pair]], *(table.pack[order[x[is_pair]]] for x in (forward, backward))
    queue = np.lexsort((backward, forward))
    doc_id, backward = doc_id[queue], backward[queue]
    for at in np.flatnonzero(backward < np.maximum.accumulate(backward)).tolist():
        latest = int(backward[:at].argmax())
        here, there = table.packs[backward[at]], table.packs[backward[latest]]
        yield (
            f"replica {here.dp_rank}: document {doc_id[at]} starts forward after document {doc_id[latest]} but "
            f"backward before it (packs {here.index} and {there.index}); documents go first in, first out"
        )


def _coverage_offences(plan: StepPlan, table: _Table) -> Iterator[str]:
    # Shared packs count once, on the first replica of their block.
    block = np.ones(len(table.packs), np.int64)
    np.maximum.at(block, table.pack, table.cp // plan.layout.cp)
    used = table.inside & (table.of_pack(one.dp_rank for one in table.packs) % block[table.pack] == 0)
    # An empty slice at the end of every document, once a direction, shows what is missing before it.
    count, ends = len(table.lengths), np.tile(table.lengths, 2)
    place = table.row + count * table.of_pack(one.direction == "backward" for one in table.packs)
    place = np.concatenate([place[used], np.arange(2 * count)])
    start, stop = np.concatenate([table.start[used], ends]), np.concatenate([table.stop[used], ends])
    order = np.lexsort((stop, start, place))
    place, start, stop = place[order], start[order], stop[order]
    # Up to which token the slices before cover their document: documents are laid end to end.
    base = place * (1 + table.lengths.max(initial=0))
    edge = np.maximum(np.concatenate([[0], np.maximum.accumulate(base + stop)])[:-1] - base, 0)
    for at in np.flatnonzero(start != edge).tolist():
        direction, doc_id = ("forward", "backward")[place[at] // count], plan.documents[place[at] % count].doc_id
        if start[at] > edge[at]:
            yield f"document {doc_id}: tokens [{edge[at]}, {start[at]}) are in no {direction} slice"
        else:
            yield f"document {doc_id}: tokens [{start[at]}, {min(edge[at], stop[at])}) are in two {direction} slices"
