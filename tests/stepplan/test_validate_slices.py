"""Columns find in a plan's slices what one slice after the other finds, and name it alike."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.slimpack import SlimpackOptions
from evenload.stepplan.validate import slice_offences
from evenload.types.document import Document, Slice
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan
from reference.slice_offences import slice_offences as offences_one_by_one

replace = msgspec.structs.replace
LIMIT = 300
CHANGES = ("range", "id", "cp", "drop", "repeat", "move", "swap", "index", "direction", "document")


def make_plan(strategy: str, dp: int = 2, pp: int = 3) -> StepPlan:
    options = PlanOptions(max_pack_tokens=LIMIT, strategies=(SlimpackOptions(cuts="asymmetric"),))
    planner = StepPlanner(
        sample_model(), sample_coefficients(), even_layout(3, dp=dp, pp=pp), None, options, host="unlimited"
    )
    lengths = [200, 150, 40, 30, 20, 10, 90, 60]
    documents = tuple(Document(doc_id=7 * i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    return planner.plan(0, documents, strategy)


PLANS = [make_plan(strategy) for strategy in ("padded", "best_fit", "balanced", "slimpack")]


@pytest.mark.parametrize("plan", PLANS, ids=[plan.strategy for plan in PLANS])
def test_good_plans_have_no_offence(plan):
    assert not list(slice_offences(plan, LIMIT))
    assert not list(offences_one_by_one(plan, LIMIT))


def mutated(draw, plan: StepPlan) -> StepPlan:
    """One thing of the packs changed: a slice, its place, a pack's name, a pack's place, a document."""
    dp_rank = draw(st.integers(0, len(plan.pack_plans) - 1))
    direction = draw(st.sampled_from(["forward", "backward"]))
    packs = list(getattr(plan.pack_plans[dp_rank], direction))
    index = draw(st.integers(0, len(packs) - 1))
    pack = packs[index]
    slices = list(pack.slices)
    position = draw(st.integers(0, len(slices) - 1))
    piece = slices[position]
    match draw(
        st.sampled_from(["range", "id", "cp", "drop", "repeat", "move", "swap", "index", "direction", "document"])
    ):
        case "range":
            start, stop = piece.start + draw(st.integers(-2, 2)), piece.stop + draw(st.integers(-2, 2))
            slices[position] = replace(piece, start=start, stop=stop)
        case "id":
            slices[position] = replace(piece, doc_id=draw(st.integers(-1, 50)))
        case "cp":
            slices[position] = replace(piece, cp=draw(st.integers(0, 4)))
        case "drop":
            del slices[position]
        case "repeat":
            slices.insert(position, piece)
        case "move":
            del slices[position]
            other = draw(st.integers(0, len(packs) - 1))
            if other != index:
                packs[other] = replace(packs[other], slices=(*packs[other].slices, piece))
        case "swap":
            other = draw(st.integers(0, len(packs) - 1))
            packs[index], packs[other] = (
                replace(packs[other], index=index),
                replace(packs[index], index=other),
            )
            pack = packs[index]
            slices = list(pack.slices)
        case "index":
            pack = replace(pack, index=pack.index + 1)
        case "direction":
            pack = replace(pack, direction="backward" if direction == "forward" else "forward")
        case "document":
            documents = list(plan.documents)
            at = draw(st.integers(0, len(documents) - 1))
            change = draw(st.sampled_from(["longer", "gone", "other"]))
            if change == "gone":
                del documents[at]
            elif change == "longer":
                documents[at] = replace(documents[at], num_tokens=documents[at].num_tokens + 1)
            else:
                documents[at] = replace(documents[at], doc_id=1)
            plan = replace(plan, documents=tuple(documents))
    packs[index] = replace(pack, slices=tuple(slices))
    changed = list(plan.pack_plans)
    changed[dp_rank] = replace(changed[dp_rank], **{direction: tuple(packs)})
    return replace(plan, pack_plans=tuple(changed))


@given(st.data())
def test_columns_name_what_one_slice_after_the_other_names(data):
    plan = mutated(data.draw, data.draw(st.sampled_from(PLANS)))
    limit = data.draw(st.sampled_from([None, LIMIT, 150]))
    found, expected = set(slice_offences(plan, limit)), set(offences_one_by_one(plan, limit))
    # Of packs that misname themselves and of slices that no document has, only the cause has to be named.
    assert bool(found) == bool(expected)
    if not any("calls itself" in one or " is not in " in one for one in expected):
        assert found == expected


def test_a_document_split_over_replicas_is_not_sound():
    plan = make_plan("best_fit")
    first = plan.pack_plans[0].forward[0].slices[0]
    other = plan.pack_plans[1]
    there = replace(other.forward[0], slices=(*other.forward[0].slices, Slice(doc_id=first.doc_id, start=0, stop=1)))
    split = replace(other, forward=(there, *other.forward[1:]))
    split = replace(plan, pack_plans=(plan.pack_plans[0], split))
    assert f"document {first.doc_id} lies on replicas 0 and 1" in set(slice_offences(split, None))
