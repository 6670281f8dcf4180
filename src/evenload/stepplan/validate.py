"""`validate_plan`: the invariants of a plan, checked on objects before anything runs.

    digest      the content is what was sealed
    layout      one pack plan, schedule and table of times per replica; ranks and stages fit the layout
    coverage    every token of every document in exactly one forward and one backward slice, on one replica or on all
                of the block that shares it
    groups      replicas that share packs run them in one order (`stepplan.validate_groups`)
    slices      at most one slice of a document in a pack; forward ascends, backward descends
    order       documents start their backward in the order in which they started their forward (FIFO)
    padding     a padded pack holds whole documents not longer than its padding
    cap         no pack above the token limit, padding included
    schedule    every pack once per stage, on the stage's rank, in order, after the forwards it needs; executable
                without deadlock (`schedule.validate`)

Independent of the planners: it reads only the plan. O(n log n) for n slices, and O(actions): about 1 µs a slice, 5 µs
where something is not plainly right (`stepplan.validate_columns`).
"""

from collections.abc import Iterator

import numpy as np

from evenload.errors import InvalidPlanError
from evenload.schedule.validate import check_schedule
from evenload.stepplan.validate_columns import slices_are_sound
from evenload.stepplan.validate_groups import block_of, group_offences
from evenload.types.micropack import MicroPack, PackPlan
from evenload.types.plan import StepPlan, plan_digest


def validate_plan(plan: StepPlan, *, max_pack_tokens: int | None = None) -> None:
    """Check a plan.

    Args:
        max_pack_tokens: the token limit it was made for; None = not checked.

    Raises:
        InvalidPlanError: naming every offence.
        ScheduleDeadlockError: the schedule alone is broken: its actions wait for each other.
    """
    offences = list(_offences(plan, max_pack_tokens))
    if offences:
        shown = "; ".join(offences[:10]) + (f"; and {len(offences) - 10} more" if len(offences) > 10 else "")
        raise InvalidPlanError(f"plan of step {plan.step} ({plan.strategy}): {shown}")
    # D of a broken pack plan means nothing, so schedules come last.
    for packs, schedule in zip(plan.pack_plans, plan.schedules, strict=True):
        try:
            check_schedule(
                schedule,
                num_forward=len(packs.forward),
                forwards_needed=packs.forwards_needed(),
                stage_to_rank=plan.layout.stage_to_rank,
            )
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
    yield from _document_offences(plan)
    if not slices_are_sound(plan, max_pack_tokens):
        yield from slice_offences(plan, max_pack_tokens)
    for dp_rank in range(dp):
        yield from _times_offences(plan, dp_rank)


def slice_offences(plan: StepPlan, max_pack_tokens: int | None) -> Iterator[str]:
    """Offences of documents, packs, coverage, order and groups, in words; for plans in which something is wrong."""
    num_tokens = {document.doc_id: document.num_tokens for document in plan.documents}
    for dp_rank, packs in enumerate(plan.pack_plans):
        if packs.dp_rank != dp_rank:
            yield f"pack plan {dp_rank} says dp_rank {packs.dp_rank}"
        for pack in (*packs.forward, *packs.backward):
            yield from _pack_offences(dp_rank, pack, num_tokens, max_pack_tokens)
        yield from _order_offences(dp_rank, packs)
    yield from group_offences(plan)
    yield from _coverage_offences(plan, num_tokens)


def _document_offences(plan: StepPlan) -> Iterator[str]:
    ids = [document.doc_id for document in plan.documents]
    if len(set(ids)) != len(ids):
        twice = next(doc_id for doc_id in ids if ids.count(doc_id) > 1)
        yield f"document {twice} is listed twice"
    labels = sum(document.num_label_tokens for document in plan.documents)
    if labels != plan.num_label_tokens:
        yield f"num_label_tokens is {plan.num_label_tokens}, the documents have {labels}"
    both = set(ids) & {document.doc_id for document in plan.left_out}
    if both:
        yield f"document {min(both)} is both trained and left out"


def _pack_offences(
    dp_rank: int, pack: MicroPack, num_tokens: dict[int, int], max_pack_tokens: int | None
) -> Iterator[str]:
    where = f"replica {dp_rank} {pack.direction} pack {pack.index}"
    seen: set[int] = set()
    for piece in pack.slices:
        if piece.doc_id in seen:
            yield f"{where} holds two slices of document {piece.doc_id}"
        seen.add(piece.doc_id)
        length = num_tokens.get(piece.doc_id)
        if length is None:
            yield f"{where} holds document {piece.doc_id}, which is not in the step"
        elif not 0 <= piece.start < piece.stop <= length:
            yield f"{where}: range [{piece.start}, {piece.stop}) of document {piece.doc_id} is not in [0, {length})"
        elif pack.pad_to and (piece.start != 0 or piece.stop != length or length > pack.pad_to):
            yield f"{where} pads to {pack.pad_to} but holds [{piece.start}, {piece.stop}) of document {piece.doc_id}"
    if not pack.slices:
        yield f"{where} is empty"
    tokens = pack.num_tokens + pack.num_padding_tokens
    if max_pack_tokens is not None and tokens > max_pack_tokens:
        yield f"{where} has {tokens} tokens, limit {max_pack_tokens}"


def _order_offences(dp_rank: int, packs: PackPlan) -> Iterator[str]:
    for direction, listed in (("forward", packs.forward), ("backward", packs.backward)):
        for index, pack in enumerate(listed):
            if pack.index != index or pack.direction != direction:
                yield f"replica {dp_rank} {direction} pack {index} calls itself {pack.direction} pack {pack.index}"
        edge: dict[int, int] = {}
        for pack in listed:
            for piece in pack.slices:
                before = edge.get(piece.doc_id)
                if before is not None and (piece.start < before if direction == "forward" else piece.stop > before):
                    rises = "ascend" if direction == "forward" else "descend"
                    yield (
                        f"replica {dp_rank}: {direction} slices of document {piece.doc_id} do not {rises} at "
                        f"[{piece.start}, {piece.stop}) in pack {pack.index}"
                    )
                edge[piece.doc_id] = piece.stop if direction == "forward" else piece.start
    first_forward, first_backward = _first_packs(packs.forward), _first_packs(packs.backward)
    latest, latest_doc = -1, -1
    documents = sorted(
        first_forward.keys() & first_backward.keys(), key=lambda d: (first_forward[d], first_backward[d])
    )
    for doc_id in documents:
        # Documents that start forward in the same pack may start backward in any order: sorted by it above.
        if first_backward[doc_id] < latest:
            yield (
                f"replica {dp_rank}: document {doc_id} starts forward after document {latest_doc} but backward "
                f"before it (packs {first_backward[doc_id]} and {latest}); documents go first in, first out"
            )
        if first_backward[doc_id] > latest:
            latest, latest_doc = first_backward[doc_id], doc_id


def _first_packs(packs: tuple[MicroPack, ...]) -> dict[int, int]:
    first: dict[int, int] = {}
    for pack in packs:
        for piece in pack.slices:
            first.setdefault(piece.doc_id, pack.index)
    return first


def _coverage_offences(plan: StepPlan, num_tokens: dict[int, int]) -> Iterator[str]:
    for direction in ("forward", "backward"):
        ranges: dict[int, list[tuple[int, int]]] = {doc_id: [] for doc_id in num_tokens}
        for dp_rank, packs in enumerate(plan.pack_plans):
            for pack in packs.forward if direction == "forward" else packs.backward:
                if block_of(plan, dp_rank, pack)[0] != dp_rank:
                    continue  # shared packs count once, where their block begins
                for piece in pack.slices:
                    if piece.doc_id in ranges:
                        ranges[piece.doc_id].append((piece.start, piece.stop))
        for doc_id, pieces in ranges.items():
            edge = 0
            for start, stop in sorted(pieces):
                if start > edge:
                    yield f"document {doc_id}: tokens [{edge}, {start}) are in no {direction} slice"
                elif start < edge:
                    yield f"document {doc_id}: tokens [{start}, {min(edge, stop)}) are in two {direction} slices"
                edge = max(edge, stop)
            if edge < num_tokens[doc_id]:
                yield f"document {doc_id}: tokens [{edge}, {num_tokens[doc_id]}) are in no {direction} slice"


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
