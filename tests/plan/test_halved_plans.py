"""Plans whose packs are computed in halves: chosen by price, promised as they run, the same after a file."""

import msgspec
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import BesideHalves
from evenload.explore.time_split import split_planned_step
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.model_catalog import model_from
from halved_plans import num_halved

LENGTHS = [30_000, 9_000, 9_000, 4_000, 4_000, 2_000, 600, 300, 100] * 3


def proposal(
    strategy: str, beside: BesideHalves | None, schedule: str = "choose", measured: bool = False, **sizes: int
):
    model, layout = model_from("llama-7b"), even_layout(32, **sizes)
    coefficients = analytic_coefficients(model, cluster_from("h100x32"), layout)
    coefficients = msgspec.structs.replace(coefficients, tensor_beside=beside)
    if measured:  # with their transfers in the layers
        coefficients = msgspec.structs.replace(coefficients, source="calibrated", tensor_exposed_share=0.0)
    planner = StepPlanner(model, coefficients, layout, None, PlanOptions(max_pack_tokens=32_768, schedule=schedule))
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n) for i, n in enumerate(LENGTHS))
    return planner, planner.propose(0, documents, strategy)


@pytest.mark.parametrize(
    ("strategy", "schedule", "sizes"),
    [
        ("balanced", "choose", {"tp": 8}),
        ("padded", "choose", {"tp": 8, "dp": 2}),
        ("slimpack", "choose", {"tp": 8, "pp": 2}),
        ("balanced", "zb_h1", {"tp": 8, "pp": 4}),
        ("auto", "choose", {"tp": 4, "pp": 4}),
    ],
)
def test_halves_are_taken_where_they_shorten_the_step(strategy, schedule, sizes) -> None:
    _, whole = proposal(strategy, None, schedule, **sizes)
    planner, halves = proposal(strategy, BesideHalves(), schedule, **sizes)
    plan = halves.plan
    validate_plan(plan)
    assert num_halved(whole.plan) == 0
    assert num_halved(plan) > 0
    assert plan.predicted.step_time_s < whole.plan.predicted.step_time_s
    assert 0 < plan.predicted.tensor_hidden_s < plan.predicted.tensor_s
    assert whole.plan.predicted.tensor_s == 0
    assert decode_plan_file(encode_plan_file([plan])) == (plan,)
    split = split_planned_step(plan, planner.costs)
    assert split.total_s() == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_what_halves_save_of_measured_layers_is_no_padding() -> None:
    planner, found = proposal("balanced", BesideHalves(), measured=True, tp=8)
    assert num_halved(found.plan) > 0
    split = split_planned_step(found.plan, planner.costs)
    assert split.total_s() == pytest.approx(found.plan.predicted.step_time_s, rel=1e-9)
    assert split.padding_s == pytest.approx(0, abs=1e-9)


def test_packs_that_a_group_shares_are_computed_in_one_go() -> None:
    _, found = proposal("balanced", BesideHalves(), tp=4, cp=2)
    assert num_halved(found.plan) == 0
    assert found.plan.predicted.tensor_s == 0
