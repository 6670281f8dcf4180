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
    dealt       where stages have several ranks, which packs go round, a document lies in one pack, the same both ways
    schedule    every pack once per stage, on the stage's rank, in order, after the forwards it needs; executable
                without deadlock (`schedule.validate`)

Independent of the planners: it reads only the plan. O(n log n) for n slices, about 1 µs each
(`stepplan.validate_slices`), and O(actions).
"""

from collections.abc import Iterator

import numpy as np

from evenload.errors import InvalidPlanError
from evenload.schedule.validate import check_schedule
from evenload.stepplan.validate_slices import slice_offences
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
                num_ranks=plan.layout.pipeline_ranks,
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
    for dp_rank, packs in enumerate(plan.pack_plans):
        if packs.dp_rank != dp_rank:
            yield f"pack plan {dp_rank} says dp_rank {packs.dp_rank}"
        if packs.policies and any(plan.layout.recomputed_counts):
            yield f"layers are recomputed for all documents, and document {min(packs.policies)} has a policy of its own"
    yield from _document_offences(plan)
    yield from slice_offences(plan, max_pack_tokens)
    for dp_rank in range(dp):
        yield from _times_offences(plan, dp_rank)
    if plan.layout.has_wide_stages:
        yield from _dealt_offences(plan)


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


def _dealt_offences(plan: StepPlan) -> Iterator[str]:
    """What a forward leaves on its rank, its backward needs there."""
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
