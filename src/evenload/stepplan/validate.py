"""Check the invariants of a plan before anything runs (`validate_plan`), independently of the planners.

    digest      the content is what was sealed
    layout      one pack plan, schedule and table of times per replica; ranks and stages fit the layout
    coverage    every token of every document is in exactly one forward and one backward slice, on one replica or on all
                of the block that shares it
    slices      at most one slice of a document in a pack; forward ascends, backward descends
    order       documents start their backward in the order in which they started their forward (FIFO)
    padding     a padded pack holds whole documents not longer than its padding
    cap         no pack above the token limit, padding included
    replicated  where stages have several ranks, which take packs in turn, a document lies in one pack, the same both
                ways
    schedule    every pack once per stage, on the stage's rank, in order, executable (`schedule.validate`)
    sharing     a slice is shared by the layout's context ranks, by one of them (DACP), or by an aligned block of
                replicas, whose size divides all; blocks do not cross, and a block's members have its documents
    collectives members of a block run shared packs, larger blocks first, in the same order in both directions, with the
                same sharding and the same order of actions on every rank

O(n log n) numpy for n slices, about 1 µs each, and O(actions).
"""

import itertools
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.errors import InvalidPlanError
from evenload.schedule.validate import check_schedule
from evenload.types.document import MicroPack, PackPlan, ReplicaBlock
from evenload.types.layout import ParallelLayout
from evenload.types.plan import Schedule, StepPlan, block_of, plan_digest


def check_replica(layout: ParallelLayout, packs: PackPlan, schedule: Schedule) -> None:
    check_schedule(
        schedule,
        num_forward=len(packs.forward),
        forwards_needed=packs.forwards_needed(),
        stage_to_rank=layout.stage_to_rank,
        num_ranks=layout.pipeline_ranks,
    )


def why_not_in_backward(plan: StepPlan) -> str:
    """Return why `optimizer.in_backward` cannot update units while the backwards of a plan run; "" = it can."""
    layout, most = plan.layout, max(len(packs.backward) for packs in plan.pack_plans)
    if layout.world_size > layout.dp or layout.num_stages > 1:
        return f"optimizer.in_backward is tested with dp alone, not {layout.describe()}; leave one of both out"
    if most > 1:
        return (
            f"a replica has {most} backward packs, and optimizer.in_backward updates weights in the first; raise "
            "plan.options.max_pack_tokens (or lower data.batch_tokens), with micro_batches = 1 of 'balanced'"
        )
    if any(action.kind == "W" for schedule in plan.schedules for row in schedule.ranks for action in row):
        return "its schedule splits backwards, which optimizer.in_backward does not; leave plan.options.schedule out"
    return ""


def _group_offences(plan: StepPlan) -> Iterator[str]:
    layout = plan.layout
    homes: dict[int, set[int]] = {}
    wanted: dict[int, ReplicaBlock] = {}
    blocks: set[ReplicaBlock] = set()
    for dp_rank, packs in enumerate(plan.pack_plans):
        for pack in (*packs.forward, *packs.backward):
            where = f"replica {dp_rank} {pack.direction} pack {pack.index}"
            _, size = block = block_of(plan, dp_rank, pack)
            for piece in pack.slices:
                if piece.cp not in (1, layout.cp, size * layout.cp) or (size > 1 and piece.cp != size * layout.cp):
                    yield (
                        f"{where}: {piece.cp} ranks share a slice of document {piece.doc_id}, "
                        f"its pack has {size} replicas"
                    )
                homes.setdefault(piece.doc_id, set()).add(dp_rank)
                if wanted.setdefault(piece.doc_id, block) != block:
                    yield f"document {piece.doc_id} lies on replicas {wanted[piece.doc_id].first} and {dp_rank}"
            if layout.dp % size:
                yield f"{where}: {size} replicas share it, which does not divide dp={layout.dp} into equal blocks"
            elif size > 1:
                blocks.add(block)
    for doc_id, block in wanted.items():
        if homes[doc_id] != set(block.replicas):
            yield (
                f"document {doc_id} is shared by replicas {block.first} to {block.replicas[-1]}, "
                f"but lies on {sorted(homes[doc_id])}"
            )
    pairs = itertools.combinations(sorted(blocks), 2)
    common = ((one, other, len({*one.replicas} & {*other.replicas})) for one, other in pairs)
    crossing = [(one, other) for one, other, count in common if 0 < count < min(one.size, other.size)]
    for one, other in crossing:
        yield (
            f"replicas {one.first} to {one.replicas[-1]} share packs and so do replicas {other.first} to "
            f"{other.replicas[-1]}; of two blocks with a replica in common one must lie in the other"
        )
    if crossing:
        return  # members of crossing blocks have no common order
    for block in sorted(blocks):
        yield from _shared_order_offences(plan, block)


def _shared_order_offences(plan: StepPlan, block: ReplicaBlock) -> Iterator[str]:
    expected = None
    for dp_rank in block.replicas:
        packs = plan.pack_plans[dp_rank]
        # Larger blocks that hold this replica hold the whole block, so their order counts too.
        shared = [
            {
                pack.index: (pack.slices, pack.sharding)
                for pack in listed
                if block_of(plan, dp_rank, pack).size >= block.size
            }
            for listed in (packs.forward, packs.backward)
        ]
        actions = [
            [(action.kind, action.stage, shared[action.kind != "F"].get(action.pack)) for action in row]
            for row in plan.schedules[dp_rank].ranks
        ]
        order = [list(listed.values()) for listed in shared], [[one for one in row if one[2]] for row in actions]
        if expected is None:
            expected = order
        elif order != expected:
            yield f"replicas {block.first} and {dp_rank} run the packs that they share in different orders or shardings"


class _Pack(NamedTuple):
    """A pack, and its place in the plan."""

    dp_rank: int
    direction: str
    index: int
    pack: MicroPack

    def __str__(self) -> str:
        return f"replica {self.dp_rank} {self.direction} pack {self.index}"


class _Table:
    """All slices, replica after replica, forward before backward, pack after pack, as columns int64[n].

    `pack` is an index into `packs`; `row` that of the document in the plan, -1 where it has none; `inside`, bool[n],
    is whether the document has such tokens.
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
        """Repeat a value of every pack for each of its slices; int64[n]."""
        return np.fromiter(values, np.int64, len(self.packs))[self.pack]

    def tokens(self, at: int) -> str:
        return f"[{self.start[at]}, {self.stop[at]})"


def _slice_offences(plan: StepPlan, max_pack_tokens: int | None) -> Iterator[str]:
    table = _Table(plan)
    yield from _pack_offences(table, max_pack_tokens)
    yield from _order_offences(table)
    dp = len(plan.pack_plans)
    homes = np.unique(table.row * dp + table.of_pack(one.dp_rank for one in table.packs)) // dp
    if (homes[1:] == homes[:-1]).any() or not np.isin(table.cp, (1, plan.layout.cp)).all():
        yield from _group_offences(plan)
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
    # Documents that start forward in the same pack may start backward in any order.
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
    # Documents are laid end to end; `edge` is the token up to which the slices before cover their document.
    base = place * (1 + table.lengths.max(initial=0))
    edge = np.maximum(np.concatenate([[0], np.maximum.accumulate(base + stop)])[:-1] - base, 0)
    for at in np.flatnonzero(start != edge).tolist():
        direction, doc_id = ("forward", "backward")[place[at] // count], plan.documents[place[at] % count].doc_id
        if start[at] > edge[at]:
            yield f"document {doc_id}: tokens [{edge[at]}, {start[at]}) are in no {direction} slice"
        else:
            yield f"document {doc_id}: tokens [{start[at]}, {min(edge[at], stop[at])}) are in two {direction} slices"


def validate_plan(plan: StepPlan, *, max_pack_tokens: int | None = None) -> None:
    """Check a plan, and its packs against a token limit.

    Raises:
        InvalidPlanError: with every offence.
        ScheduleDeadlockError: actions of a schedule wait for each other.
    """
    if offences := list(_offences(plan, max_pack_tokens)):
        shown = "; ".join(offences[:10]) + (f"; and {len(offences) - 10} more" if len(offences) > 10 else "")
        raise InvalidPlanError(f"plan of step {plan.step} ({plan.strategy}): {shown}")
    # D of a broken pack plan means nothing, so schedules come last.
    for packs, schedule in zip(plan.pack_plans, plan.schedules, strict=True):
        try:
            check_replica(plan.layout, packs, schedule)
        except InvalidPlanError as error:
            raise type(error)(
                f"plan of step {plan.step} ({plan.strategy}): replica {packs.dp_rank}: {error}"
            ) from error


def _offences(plan: StepPlan, max_pack_tokens: int | None) -> Iterator[str]:
    if plan.digest != plan_digest(plan):
        yield f"digest is '{plan.digest}', the content gives '{plan_digest(plan)}'"
    dp = plan.layout.dp
    for name, entries in (("pack plans", plan.pack_plans), ("schedules", plan.schedules), ("times", plan.times)):
        if len(entries) != dp:
            yield f"layout has dp={dp} but there are {len(entries)} {name}"
            return
    for dp_rank, packs in enumerate(plan.pack_plans):
        if packs.dp_rank != dp_rank:
            yield f"pack plan {dp_rank} says dp_rank {packs.dp_rank}"
        if packs.policies and any(plan.layout.recomputed_counts):
            yield f"layers are recomputed for all documents, and document {min(packs.policies)} has a policy of its own"
    yield from _document_offences(plan)
    yield from _slice_offences(plan, max_pack_tokens)
    for dp_rank in range(dp):
        yield from _times_offences(plan, dp_rank)
    if plan.layout.has_replicated_stages:
        yield from _replicated_stage_offences(plan)


def _document_offences(plan: StepPlan) -> Iterator[str]:
    ids = [document.doc_id for document in plan.documents]
    if len(set(ids)) != len(ids):
        twice = next(doc_id for doc_id in ids if ids.count(doc_id) > 1)
        yield f"document {twice} is listed twice"
    labels = sum(document.num_label_tokens for document in plan.documents)
    if labels != plan.num_label_tokens:
        yield f"num_label_tokens is {plan.num_label_tokens}, the documents have {labels}"
    if both := set(ids) & {document.doc_id for document in plan.left_out}:
        yield f"document {min(both)} is both trained and left out"


def _replicated_stage_offences(plan: StepPlan) -> Iterator[str]:
    """A backward needs what its forward left on its rank."""
    for packs in plan.pack_plans:
        if [pack.slices for pack in packs.forward] != [pack.slices for pack in packs.backward]:
            yield (
                f"replica {packs.dp_rank}: backward packs are not the forward packs, in their order, which layout "
                f"{plan.layout.describe()} needs"
            )
        home: dict[int, int] = {}
        for pack in packs.forward:
            for piece in pack.slices:
                if home.setdefault(piece.doc_id, pack.index) != pack.index:
                    yield (
                        f"replica {packs.dp_rank}: document {piece.doc_id} lies in packs {home[piece.doc_id]} and "
                        f"{pack.index}, which different ranks of a stage of {plan.layout.describe()} would run"
                    )


def _times_offences(plan: StepPlan, dp_rank: int) -> Iterator[str]:
    packs, times, stages = plan.pack_plans[dp_rank], plan.times[dp_rank], plan.layout.num_stages
    for direction, listed, rows, p2p_s in (
        ("forward", packs.forward, times.forward_s, times.p2p_forward_s),
        ("backward", packs.backward, times.backward_s, times.p2p_backward_s),
    ):
        if len(rows) != len(listed) or any(len(row) != stages for row in rows) or len(p2p_s) != len(listed):
            yield f"replica {dp_rank}: {direction} times are not {len(listed)} packs x {stages} stages and p2p"
            return
    if times.input_s or times.weight_s:
        shapes = {tuple(map(len, rows)) for rows in (times.backward_s, times.input_s, times.weight_s)}
        whole, parts = np.array(times.backward_s), (np.array(times.input_s), np.array(times.weight_s))
        if len(shapes) != 1 or not np.allclose(whole, sum(parts), rtol=1e-9, atol=0):
            yield f"replica {dp_rank}: input and weight times do not add up to the backward times"
    elif any(action.kind in "IW" for row in plan.schedules[dp_rank].ranks for action in row):
        yield f"replica {dp_rank}: the schedule splits backwards, but there are no input and weight times"
