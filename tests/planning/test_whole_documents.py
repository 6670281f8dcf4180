"""Where a layer mixes tokens in a way of its own, every strategy plans, and no document is cut or shared."""

import pytest

from cost_samples import documents, mixed_model, sample_coefficients
from evenload.errors import DataError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

LINK = LinkSpec(bandwidth_bytes_per_s=1e3, latency_s=0.01)
DOCUMENTS = documents([300, 10, 10, 20, 80, 5, 5, 40, 7, 9, 11, 30])


def planner(model, pp: int, limit: int | None) -> StepPlanner:
    coefficients = sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8)
    options = PlanOptions(max_pack_tokens=limit, dp_merge=True, policy="replay")
    return StepPlanner(model, coefficients, even_layout(3, dp=2, pp=pp), None, options, host="unlimited")


@pytest.mark.parametrize("pp", [1, 3])
@pytest.mark.parametrize("name", [one.name for one in STRATEGIES.values() if not one.needs_solver])
def test_documents_stay_whole_under_every_strategy(name: str, pp: int) -> None:
    if pp > 1 and STRATEGIES[name].needs_one_stage:
        return
    plan = planner(mixed_model(), pp, 300).plan(0, DOCUMENTS, name)
    slices = [
        one
        for pack_plan in plan.pack_plans
        for packs in (pack_plan.forward, pack_plan.backward)
        for pack in packs
        for one in pack.slices
    ]
    assert len(slices) == 2 * len(DOCUMENTS)
    assert {one.start for one in slices} == {0}


def test_cutting_strategies_cut_where_no_mixer_forbids_it() -> None:
    plan = planner(mixed_model(mixer=""), 3, 300).plan(0, DOCUMENTS, "slimpack")
    starts = [one.start for pack_plan in plan.pack_plans for pack in pack_plan.forward for one in pack.slices]
    assert any(starts)


@pytest.mark.parametrize("name", ["slimpack", "sequential"])
def test_a_document_beyond_a_pack_is_named(name: str) -> None:
    with pytest.raises(DataError, match="document 0 has 300 tokens, max_pack_tokens is 299"):
        planner(mixed_model(), 3, 299).plan(0, DOCUMENTS, name)
