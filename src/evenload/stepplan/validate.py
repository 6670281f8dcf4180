"""Check the invariants of a plan before anything runs (`validate_plan`), independently of the planners.

    digest      the content is what was sealed
    layout      one pack plan, schedule and table of times per replica; ranks and stages fit the layout
    coverage    every token of every document is in exactly one forward and one backward slice, on one replica or on all
                of the block that shares it
    slices      at most one slice of a document in a pack; forward ascends, backward descends
    order       documents start their backward in the order in which they started their forward (FIFO)
    padding     a padded pack holds whole documents not longer than its padding
    cap         no pack above the token limit, padding included
    trees       a tree of sequences has a row for every token of its segments, and its slices no padding and one rank
    replicated  where stages have several ranks, which take packs in turn, a document lies in one pack, the same both
                ways
    schedule    every pack once per stage, on the stage's rank, in order, executable (`schedule.simulate`)
    sharing     a slice is shared by the layout's context ranks, by one of them (DACP), or by a block of replicas that
                begins at a multiple of its size; blocks do not cross, and a block's members have its documents
    collectives members of a block run shared packs, larger blocks first, in the same order in both directions, with the
                same sharding and the same order of actions on every rank

O(n log n) for n slices, and O(actions).
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from evenload.errors import InvalidPlanError
from evenload.schedule.simulate import check_schedule
from evenload.stepplan.tree_slices import tree_offences
from evenload.types.document import Direction, MicroPack, PackPlan, ReplicaBlock, Slice
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
            if size > 1 and (size not in layout.block_sizes or block.first + size > layout.dp):
                yield f"{where}: {size} replicas share it, from {block.first} on, which are no block of dp={layout.dp}"
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


def _sides(packs: PackPlan) -> tuple[tuple[Direction, tuple[MicroPack, ...]], ...]:
    return ("forward", packs.forward), ("backward", packs.backward)


def _pack_offences(plan: StepPlan, max_pack_tokens: int | None) -> Iterator[str]:
    lengths = {document.doc_id: document.num_tokens for document in plan.documents}
    for dp_rank, packs in enumerate(plan.pack_plans):
        for direction, listed in _sides(packs):
            for index, pack in enumerate(listed):
                where = f"replica {dp_rank} {direction} pack {index}"
                if pack.index != index or pack.direction != direction:
                    yield f"{where} calls itself {pack.direction} pack {pack.index}"
                if not pack.slices:
                    yield f"{where} is empty"
                computed = pack.num_tokens + pack.num_padding_tokens
                if max_pack_tokens is not None and computed > max_pack_tokens:
                    yield f"{where} has {computed} tokens, limit {max_pack_tokens}"
                for piece in pack.slices:
                    length = lengths.get(piece.doc_id)
                    if length is None:
                        yield f"{where} holds document {piece.doc_id}, which is not in the step"
                    elif not 0 <= piece.start < piece.stop <= length:
                        yield f"{where}: range {_range(piece)} of document {piece.doc_id} is not in [0, {length})"
                    elif pack.pad_to and (piece.stop - piece.start < length or length > pack.pad_to):
                        yield f"{where} pads to {pack.pad_to} but holds {_range(piece)} of document {piece.doc_id}"


def _range(piece: Slice) -> str:
    return f"[{piece.start}, {piece.stop})"


def _order_offences(dp_rank: int, packs: PackPlan) -> Iterator[str]:
    first: dict[Direction, dict[int, int]] = {"forward": {}, "backward": {}}  # packs in which documents start
    for direction, listed in _sides(packs):
        latest: dict[int, tuple[int, Slice]] = {}
        for index, pack in enumerate(listed):
            for piece in pack.slices:
                before_index, before = latest.get(piece.doc_id, (-1, None))
                latest[piece.doc_id] = index, piece
                if before is None:
                    first[direction][piece.doc_id] = index
                    continue
                if before_index == index:
                    yield f"replica {dp_rank} {direction} pack {index} holds two slices of document {piece.doc_id}"
                if piece.start < before.stop if direction == "forward" else piece.stop > before.start:
                    yield (
                        f"replica {dp_rank}: {direction} slices of document {piece.doc_id} do not "
                        f"{'ascend' if direction == 'forward' else 'descend'} at {_range(piece)} in pack {index}"
                    )
    # Documents that start forward in the same pack may start backward in any order.
    starts = [
        (at, first["backward"][doc_id], doc_id)
        for doc_id, at in first["forward"].items()
        if doc_id in first["backward"]
    ]
    latest_pack, latest_id = -1, -1
    for _, pack, doc_id in sorted(starts):
        if pack < latest_pack:
            yield (
                f"replica {dp_rank}: document {doc_id} starts forward after document {latest_id} but backward before "
                f"it (packs {pack} and {latest_pack}); documents go first in, first out"
            )
        elif pack > latest_pack:
            latest_pack, latest_id = pack, doc_id


def _coverage_offences(plan: StepPlan) -> Iterator[str]:
    for side, direction in enumerate(("forward", "backward")):
        spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for dp_rank, packs in enumerate(plan.pack_plans):
            for pack in _sides(packs)[side][1]:
                if block_of(plan, dp_rank, pack).first == dp_rank:  # shared packs count once
                    for piece in pack.slices:
                        spans[piece.doc_id].append((piece.start, piece.stop))
        for document in plan.documents:
            doc_id, length, covered = document.doc_id, document.num_tokens, 0
            if spans[doc_id] == [(0, length)]:
                continue  # whole, as most are
            inside = [(start, stop) for start, stop in spans[doc_id] if 0 <= start < stop <= length]
            # An empty slice at the end shows what is missing before it.
            for start, stop in sorted([*inside, (length, length)]):
                if start > covered:
                    yield f"document {doc_id}: tokens [{covered}, {start}) are in no {direction} slice"
                elif start < covered:
                    yield f"document {doc_id}: tokens [{start}, {min(covered, stop)}) are in two {direction} slices"
                covered = max(covered, stop)


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
    yield from tree_offences(plan)
    yield from _pack_offences(plan, max_pack_tokens)
    for dp_rank, packs in enumerate(plan.pack_plans):
        yield from _order_offences(dp_rank, packs)
    yield from _group_offences(plan)
    yield from _coverage_offences(plan)
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
