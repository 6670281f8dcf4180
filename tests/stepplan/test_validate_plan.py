"""Every invariant of a plan is broken once on purpose; the validator must name each."""

import msgspec
import pytest

from cost_samples import documents, sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.planning.planner import StepPlanner
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Slice
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
    return planner.plan(0, documents([200, 150, 40, 30, 20, 10]), strategy)


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


def test_good_plan_passes() -> None:
    for strategy in ("padded", "best_fit", "balanced", "slimpack"):
        validate_plan(make_plan(strategy), max_pack_tokens=300)


def swapped(plan: StepPlan, direction: str) -> StepPlan:
    """The first two packs of a direction in each other's place."""
    packs = list(getattr(plan.pack_plans[0], direction))
    packs[0], packs[1] = replace(packs[1], index=0), replace(packs[0], index=1)
    return with_packs(plan, direction, packs)


def first_pack(plan: StepPlan, **changes) -> StepPlan:
    packs = list(plan.pack_plans[0].forward)
    return with_packs(plan, "forward", [replace(packs[0], **changes), *packs[1:]])


def repeated_tokens(plan: StepPlan) -> StepPlan:
    packs = plan.pack_plans[0].backward
    index = next(i for i, pack in enumerate(packs) if pack.slices[0].start > 3)
    piece = packs[index].slices[0]
    return with_slice(plan, "backward", index, 0, replace(piece, start=piece.start - 3))


def halved_slice(plan: StepPlan) -> StepPlan:
    first, *rest = plan.pack_plans[0].forward[0].slices
    middle = (first.start + first.stop) // 2
    return first_pack(plan, slices=(replace(first, stop=middle), replace(first, start=middle), *rest))


def changed_slice(plan: StepPlan, place: int, **changes) -> StepPlan:
    piece = plan.pack_plans[0].forward[place].slices[place]
    return with_slice(plan, "forward", place, place, replace(piece, **changes))


def too_long_slice(plan: StepPlan) -> StepPlan:
    return changed_slice(plan, -1, stop=plan.pack_plans[0].forward[-1].slices[-1].stop + 1)


def short_padding(plan: StepPlan) -> StepPlan:
    packs = list(plan.pack_plans[0].forward)
    index = next(i for i, pack in enumerate(packs) if pack.pad_to)
    packs[index] = replace(packs[index], pad_to=packs[index].pad_to - 1)
    return with_packs(plan, "forward", packs)


def doubled(plan: StepPlan) -> StepPlan:
    twice = (plan.pack_plans[0], replace(plan.pack_plans[0], dp_rank=1))
    layout = even_layout(3, dp=2, pp=3)
    return seal(replace(plan, layout=layout, pack_plans=twice, schedules=plan.schedules * 2, times=plan.times * 2))


def without_last_action(plan: StepPlan) -> StepPlan:
    ranks = plan.schedules[0].ranks
    return seal(replace(plan, schedules=(Schedule(ranks=(ranks[0][:-1], *ranks[1:])),)))


LEFT = (LeftOut(doc_id=0, num_tokens=200, reason="deferred"),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, digest="0" * 16), "digest"),
        (lambda plan: changed_slice(plan, 0, start=5), r"document \d: tokens \[0, 5\) are in no forward slice"),
        (repeated_tokens, r"document \d: tokens \[\d+, \d+\) are in two backward slices"),
        (lambda plan: changed_slice(plan, 0, doc_id=77), "document 77, which is not in the step"),
        (too_long_slice, r"of document \d is not in \[0, \d+\)"),
        (halved_slice, r"two slices of document \d"),
        (lambda plan: swapped(plan, "forward"), "slices of document 0 do not ascend"),
        (lambda plan: swapped(plan, "backward"), "slices of document 0 do not descend"),
        (lambda plan: first_pack(plan, slices=()), "forward pack 0 is empty"),
        (lambda plan: first_pack(plan, index=5), "forward pack 0 calls itself forward pack 5"),
        (lambda plan: seal(replace(plan, layout=even_layout(3, dp=2, pp=3))), "dp=2 but there are 1 pack plans"),
        (lambda plan: seal(replace(plan, num_label_tokens=1)), "num_label_tokens is 1"),
        (
            lambda plan: seal(replace(plan, documents=(*plan.documents, plan.documents[0]))),
            "document 0 is listed twice",
        ),
        (lambda plan: seal(replace(plan, left_out=LEFT)), "document 0 is both trained and left out"),
        (doubled, "document 0 lies on replicas 0 and 1"),
        (
            lambda plan: seal(replace(plan, times=(replace(plan.times[0], forward_s=plan.times[0].forward_s[1:]),))),
            "forward times are not",
        ),
        (without_last_action, "runs 0 times on rank 0"),
        (
            lambda plan: with_packs(plan, "forward", [replace(pack, slices=()) for pack in plan.pack_plans[0].forward]),
            "more",
        ),
    ],
)
def test_an_offence_is_named(change, message) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        validate_plan(change(make_plan()))


@pytest.mark.parametrize(
    ("strategy", "change", "message"),
    [
        ("best_fit", lambda plan: swapped(plan, "backward"), "documents go first in, first out"),
        ("padded", short_padding, "pads to"),
    ],
)
def test_an_offence_of_whole_documents_is_named(strategy, change, message) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        validate_plan(change(make_plan(strategy, max_pack_tokens=200)))


def test_pack_above_the_token_limit_counts_padding() -> None:
    plan = make_plan("padded")
    largest = max(p.num_tokens + p.num_padding_tokens for p in plan.pack_plans[0].forward)
    assert largest > max(p.num_tokens for p in plan.pack_plans[0].forward)
    validate_plan(plan, max_pack_tokens=largest)
    with pytest.raises(InvalidPlanError, match=f"has {largest} tokens, limit {largest - 1}"):
        validate_plan(plan, max_pack_tokens=largest - 1)


def test_deadlock() -> None:
    """Each rank's own list is legal: stage 0 goes F0 B0 F1 B1, the last stage wants all forwards first."""
    plan = make_plan("best_fit", max_pack_tokens=200)
    ranks = plan.schedules[0].ranks
    first = tuple(sorted(ranks[0], key=lambda action: (action.pack, action.kind == "B")))
    last = tuple(sorted(ranks[2], key=lambda action: (action.kind == "B", action.pack)))
    assert len(first) >= 4
    with pytest.raises(ScheduleDeadlockError, match="replica 0"):
        validate_plan(seal(replace(plan, schedules=(Schedule(ranks=(first, ranks[1], last)),))))
