"""Every invariant of a plan is broken once on purpose; the validator must name each."""

import msgspec
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.plan.planner import StepPlanner
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Document, Slice
from evenload.types.layout import even_layout
from evenload.types.plan import LeftOut, Schedule, StepPlan, seal

replace = msgspec.structs.replace


def make_plan(strategy: str = "slimpack", **options) -> StepPlan:
    planner = StepPlanner(
        sample_model(),
        sample_coefficients(),
        even_layout(3, dp=1, pp=3),
        None,
        plan_options({"max_pack_tokens": 300, "slimpack": {"cuts": "asymmetric"}, **options}),
        host="unlimited",
    )
    lengths = [200, 150, 40, 30, 20, 10]
    step = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    return planner.plan(0, step, strategy)


def with_packs(plan: StepPlan, direction: str, packs) -> StepPlan:
    changed = replace(plan.pack_plans[0], **{direction: tuple(packs)})
    return seal(replace(plan, pack_plans=(changed,)))


def with_slice(plan: StepPlan, direction: str, index: int, position: int, piece: Slice | None) -> StepPlan:
    packs = list(getattr(plan.pack_plans[0], direction))
    slices = list(packs[index].slices)
    if piece is None:
        del slices[position]
    else:
        slices[position] = piece
    packs[index] = replace(packs[index], slices=tuple(slices))
    return with_packs(plan, direction, packs)


def offence(plan: StepPlan, **limits) -> str:
    with pytest.raises(InvalidPlanError) as caught:
        validate_plan(plan, **limits)
    return str(caught.value)


def test_good_plan_passes() -> None:
    for strategy in ("padded", "best_fit", "balanced", "slimpack"):
        validate_plan(make_plan(strategy), max_pack_tokens=300)


def test_wrong_digest() -> None:
    assert "digest" in offence(replace(make_plan(), digest="0" * 16))


def test_missing_tokens_name_document_and_range() -> None:
    plan = make_plan()
    first = plan.pack_plans[0].forward[0].slices[0]
    assert first.start == 0
    text = offence(with_slice(plan, "forward", 0, 0, replace(first, start=5)))
    assert f"document {first.doc_id}: tokens [0, 5) are in no forward slice" in text


def test_repeated_tokens_name_document_and_range() -> None:
    plan = make_plan()
    packs = plan.pack_plans[0].backward
    index = next(i for i, pack in enumerate(packs) if pack.slices[0].start > 3)
    piece = packs[index].slices[0]
    text = offence(with_slice(plan, "backward", index, 0, replace(piece, start=piece.start - 3)))
    assert f"document {piece.doc_id}: tokens [{piece.start - 3}, {piece.start}) are in two backward slices" in text


def test_unknown_document_and_range_outside() -> None:
    plan = make_plan()
    piece = plan.pack_plans[0].forward[0].slices[0]
    assert "document 77, which is not in the step" in offence(
        with_slice(plan, "forward", 0, 0, replace(piece, doc_id=77))
    )
    last = plan.pack_plans[0].forward[-1].slices[-1]
    text = offence(with_slice(plan, "forward", -1, -1, replace(last, stop=last.stop + 1)))
    assert f"of document {last.doc_id} is not in [0, {last.stop})" in text


def test_two_slices_of_a_document_in_a_pack() -> None:
    plan = make_plan()
    packs = list(plan.pack_plans[0].forward)
    first, rest = packs[0].slices[0], packs[0].slices[1:]
    middle = (first.start + first.stop) // 2
    packs[0] = replace(packs[0], slices=(replace(first, stop=middle), replace(first, start=middle), *rest))
    assert f"two slices of document {first.doc_id}" in offence(with_packs(plan, "forward", packs))


@pytest.mark.parametrize(("direction", "word"), [("forward", "ascend"), ("backward", "descend")])
def test_slices_in_the_wrong_order(direction: str, word: str) -> None:
    plan = make_plan()
    packs = list(getattr(plan.pack_plans[0], direction))
    packs[0], packs[1] = (replace(packs[1], index=0), replace(packs[0], index=1))
    assert f"slices of document 0 do not {word}" in offence(with_packs(plan, direction, packs))


def test_documents_out_of_fifo_order() -> None:
    plan = make_plan("best_fit", max_pack_tokens=200)
    packs = list(plan.pack_plans[0].backward)
    assert len(packs) > 1
    packs[0], packs[1] = (replace(packs[1], index=0), replace(packs[0], index=1))
    assert "documents go first in, first out" in offence(with_packs(plan, "backward", packs))


def test_pack_above_the_token_limit_counts_padding() -> None:
    plan = make_plan("padded")
    largest = max(p.num_tokens + p.num_padding_tokens for p in plan.pack_plans[0].forward)
    assert largest > max(p.num_tokens for p in plan.pack_plans[0].forward)
    validate_plan(plan, max_pack_tokens=largest)
    assert f"has {largest} tokens, limit {largest - 1}" in offence(plan, max_pack_tokens=largest - 1)


def test_padding_shorter_than_a_document() -> None:
    plan = make_plan("padded")
    packs = list(plan.pack_plans[0].forward)
    index = next(i for i, pack in enumerate(packs) if pack.pad_to)
    packs[index] = replace(packs[index], pad_to=packs[index].pad_to - 1)
    assert "pads to" in offence(with_packs(plan, "forward", packs))


def test_empty_pack() -> None:
    plan = make_plan()
    packs = list(plan.pack_plans[0].forward)
    packs[0] = replace(packs[0], slices=())
    assert "forward pack 0 is empty" in offence(with_packs(plan, "forward", packs))


def test_pack_that_misnames_itself() -> None:
    plan = make_plan()
    packs = list(plan.pack_plans[0].forward)
    packs[0] = replace(packs[0], index=5)
    assert "forward pack 0 calls itself forward pack 5" in offence(with_packs(plan, "forward", packs))


def test_layout_with_another_number_of_replicas() -> None:
    plan = make_plan()
    assert "dp=2 but there are 1 pack plans" in offence(seal(replace(plan, layout=even_layout(3, dp=2, pp=3))))


def test_wrong_label_count_and_documents_listed_twice_or_left_out() -> None:
    plan = make_plan()
    assert "num_label_tokens is 1" in offence(seal(replace(plan, num_label_tokens=1)))
    assert "document 0 is listed twice" in offence(seal(replace(plan, documents=(*plan.documents, plan.documents[0]))))
    left = (LeftOut(doc_id=0, num_tokens=200, reason="deferred"),)
    assert "document 0 is both trained and left out" in offence(seal(replace(plan, left_out=left)))


def test_document_on_two_replicas() -> None:
    plan = make_plan()
    twice = (plan.pack_plans[0], replace(plan.pack_plans[0], dp_rank=1))
    doubled = replace(
        plan, layout=even_layout(3, dp=2, pp=3), pack_plans=twice, schedules=plan.schedules * 2, times=plan.times * 2
    )
    assert "document 0 lies on replicas 0 and 1" in offence(seal(doubled))


def test_times_of_another_shape() -> None:
    plan = make_plan()
    times = (replace(plan.times[0], forward_s=plan.times[0].forward_s[1:]),)
    assert "forward times are not" in offence(seal(replace(plan, times=times)))


def test_missing_action() -> None:
    plan = make_plan()
    ranks = plan.schedules[0].ranks
    missing = seal(replace(plan, schedules=(Schedule(ranks=(ranks[0][:-1], *ranks[1:])),)))
    assert "missing on rank 0" in offence(missing)


def test_deadlock() -> None:
    """Each rank's own list is legal: stage 0 goes F0 B0 F1 B1, the last stage wants all forwards first."""
    plan = make_plan("best_fit", max_pack_tokens=200)
    ranks = plan.schedules[0].ranks
    first = tuple(sorted(ranks[0], key=lambda action: (action.pack, action.kind == "B")))
    last = tuple(sorted(ranks[2], key=lambda action: (action.kind == "B", action.pack)))
    assert len(first) >= 4
    with pytest.raises(ScheduleDeadlockError, match="replica 0"):
        validate_plan(seal(replace(plan, schedules=(Schedule(ranks=(first, ranks[1], last)),))))


def test_many_offences_are_counted_not_listed() -> None:
    plan = make_plan()
    packs = [replace(pack, slices=()) for pack in plan.pack_plans[0].forward]
    assert "more" in offence(with_packs(plan, "forward", packs))
