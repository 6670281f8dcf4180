"""FlexPipe's O_plan: layers that recompute for all documents, in stages that lack memory."""

import itertools

import msgspec
import numpy as np
import pytest

from cost_samples import documents
from evenload.cost.memory import byte_rates
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.explore.timelines import split_proposal
from evenload.planning.layouts.layout_plans import MOST_PLANS, plan_recomputing_layers
from evenload.planning.planner import StepPlanner
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout
from evenload.types.plan import decode_plan, encode_plan, seal
from flex_cases import LONG, MIDDLE, PUBLISHED, make

LAYERS = 8


def planner_of(layout, cap_bytes, policy="replay"):
    start = make(layout.dp, layout.pp, cap_bytes, num_layers=LAYERS).start
    options = msgspec.structs.replace(start.options, policy=policy)
    return StepPlanner(start.costs.model, start.costs.coefficients, layout, cap_bytes, options, host="unlimited")


def peaks(proposal):
    return np.max([choice.candidate.simulation.peak_bytes for choice in proposal.choices], axis=0)


@pytest.mark.parametrize("lengths", [LONG, MIDDLE, [400, 30, 60, 200, 90]])
@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 2), (1, 4), (1, 1)])
def test_few_layers_recompute_and_no_choice_is_much_faster(lengths, dp, pp):
    layout = even_layout(LAYERS, dp=dp, pp=pp)
    model = planner_of(layout, None).costs.model
    every = list(itertools.product(*(range(count + 1) for count in layout.stage_counts)))
    free = planner_of(layout, None).propose(0, documents(lengths), "flexpipe")
    least = planner_of(layout.recomputing(every[-1]), None).propose(0, documents(lengths), "flexpipe")
    for share in (0.2, 0.5, 0.9):
        cap_bytes = int(peaks(least).max() + share * (peaks(free).max() - peaks(least).max()))
        planned = []

        def plan_with(one, cap_bytes=cap_bytes, planned=planned):
            planned.append(one)
            return planner_of(one, cap_bytes).propose(0, documents(lengths), "flexpipe")

        result = plan_recomputing_layers(model, layout, cap_bytes, plan_with)
        assert len(planned) <= MOST_PLANS
        assert result is not None
        assert result.feasible
        chosen = every if pp < 4 else every[::7]
        others = [planner_of(layout.recomputing(one), cap_bytes).propose(0, documents(lengths), "flexpipe")
                  for one in chosen]  # fmt: skip
        best_s = min(one.plan.predicted.step_time_s for one in others if one.feasible)
        assert result.plan.predicted.step_time_s <= 1.03 * best_s
        # Under a limit smaller packs may do.
        stored = planner_of(layout, cap_bytes).propose(0, documents(lengths), "flexpipe")
        assert any(result.plan.layout.recomputed_counts) != stored.feasible


def test_what_no_recomputing_saves_has_no_plan():
    layout = even_layout(LAYERS, pp=2)
    model = planner_of(layout, 30_000).costs.model
    plan_with = lambda one: planner_of(one, 30_000).propose(0, documents(LONG), "flexpipe")  # noqa: E731
    assert plan_recomputing_layers(model, layout, 30_000, plan_with) is None


def test_seconds_and_bytes_are_those_of_as_many_recomputed_documents():
    """With all layers recomputed a pack costs what it costs with all its documents recomputed, to rounding."""
    layout = even_layout(LAYERS, pp=2)
    both = [
        planner_of(layout.recomputing(layout.stage_counts), None).propose(0, documents(LONG), "flexpipe"),
        planner_of(layout, None, "recompute").propose(0, documents(LONG), "flexpipe"),
    ]
    assert both[0].plan.predicted.step_time_s == pytest.approx(both[1].plan.predicted.step_time_s)
    assert peaks(both[0]).tolist() == peaks(both[1]).tolist()
    first, second = (split_proposal(one) for one in both)
    assert first.recompute_s == pytest.approx(second.recompute_s)
    assert first.recompute_s > 0
    assert first.useful_s == pytest.approx(second.useful_s)
    stored = planner_of(layout, None).costs
    again_s, kept_bytes = stored.linear_again_s[0].tolist(), byte_rates(stored.model, layout).chunk[0]
    for counts in ((0, 0), (1, 0), (2, 3)):
        costs = PackCosts(stored.model, stored.coefficients, layout.recomputing(counts))
        more = costs.stage_seconds["backward"][0] - stored.stage_seconds["backward"][0]
        assert more.tolist() == pytest.approx([n / 4 * s for n, s in zip(counts, again_s, strict=True)])
        assert costs.lower_bound_seconds(LONG) == stored.lower_bound_seconds(LONG)
        saved = kept_bytes - byte_rates(stored.model, layout.recomputing(counts)).chunk[0]
        assert (saved > 0).tolist() == [n > 0 for n in counts]


def test_plans_with_recomputed_layers_travel_and_no_document_has_a_policy_beside_them():
    layout = even_layout(LAYERS, pp=2).recomputing((3, 1))
    plan = planner_of(layout, None).plan(0, documents(LONG), "flexpipe")
    validate_plan(plan)
    assert plan.layout.describe() == "pp=2 recomputed=3+1"
    assert plan.layout.arrangement == even_layout(LAYERS, pp=2)
    assert [list(plan.layout.recomputed_layers(stage)) for stage in (0, 1)] == [[0, 1, 2], [4]]
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_plan_file(encode_plan_file([plan])) == (plan,)
    packs = msgspec.structs.replace(plan.pack_plans[0], policies={0: "recompute"})
    with pytest.raises(Exception, match="layers are recomputed for all documents, and document 0 has a policy"):
        validate_plan(seal(msgspec.structs.replace(plan, pack_plans=(packs,))))
    with pytest.raises(ConfigError, match=r"\(5, 0\) layers of the stages are recomputed, expected one number of each"):
        layout.recomputing((5, 0))
    assert b"stage_recomputed" not in encode_plan(planner_of(layout.arrangement, None).plan(0, (), "flexpipe"))


def test_the_faster_memory_plan_is_the_layouts_and_both_are_told():
    """Stage by stage, or document by document."""
    reported = {}
    for memory_plans in (("documents", "layers"), ("documents",), ("layers",), ()):
        flex = make(1, 2, 1, num_layers=LAYERS, memory_plans=memory_plans, **PUBLISHED)
        stored = planner_of(flex.layout, None).propose(0, documents(MIDDLE), "flexpipe")
        cap_bytes = int(0.9 * peaks(stored).max())
        flex = make(1, 2, cap_bytes, 1e-3, num_layers=LAYERS, memory_plans=memory_plans, **PUBLISHED)
        result = flex.propose(0, documents(MIDDLE))
        reported[memory_plans] = result.told
        if memory_plans:
            assert result.proposal.feasible
            assert (result.told.case, result.told.fits, result.told.fits_saving) == (2, False, True)
            assert result.state.layout == flex.layout
            seconds = [s for s in (result.told.save_documents_s, result.told.save_layers_s) if s is not None]
            assert result.proposal.plan.predicted.step_time_s == min(seconds)
            by_layers = any(result.proposal.plan.layout.recomputed_counts)
            assert by_layers == (min(seconds) == result.told.save_layers_s)
            assert by_layers == ("layers of its stages" in result.told.memory_plan)
            assert result.told.memory_plan in result.told.why
            validate_plan(result.proposal.plan)
    both, one, other, none = reported.values()
    assert (both.save_documents_s, both.save_layers_s) == (one.save_documents_s, other.save_layers_s)
    assert one.save_layers_s is other.save_documents_s is None
    assert not none.fits_saving
