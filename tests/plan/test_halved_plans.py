"""Plans whose packs are computed in halves: chosen by price, promised as they run, the same after a file."""

import msgspec
import numpy as np
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import BesideHalves
from evenload.explore.time_split import split_planned_step
from evenload.hub.model_files import model_from
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.search.halved_search import in_one_go, searched_as_if_halved
from evenload.plan.sharing.as_run import as_run
from evenload.plan.strategies.auto import searched
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster_catalog import cluster_from
from evenload.types.document import Document
from evenload.types.layout import even_layout
from halved_plans import num_halved

LENGTHS = [30_000, 9_000, 9_000, 4_000, 4_000, 2_000, 600, 300, 100] * 3


def proposal(
    strategy: str,
    beside: BesideHalves | None,
    schedule: str = "choose",
    measured: bool = False,
    exchange: str = "all_gather",
    lengths: list[int] = LENGTHS,
    **sizes: int,
):
    model, layout = model_from("llama-7b"), even_layout(32, **sizes)
    coefficients = analytic_coefficients(model, cluster_from("h100x32"), layout)
    coefficients = msgspec.structs.replace(coefficients, tensor_beside=beside, context_exchange=exchange)
    options = PlanOptions(max_pack_tokens=max(32_768, *lengths), schedule=schedule, dp_merge=lengths is not LENGTHS)
    if measured:  # with their transfers in the layers
        coefficients = msgspec.structs.replace(coefficients, source="calibrated", tensor_exposed_share=0.0)
    planner = StepPlanner(model, coefficients, layout, None, options, host="unlimited")
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n) for i, n in enumerate(lengths))
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


@pytest.mark.parametrize(
    ("strategy", "sizes"), [("balanced", {"cp": 2}), ("slimpack", {"dp": 2, "lengths": [100_000, *LENGTHS]})]
)
def test_packs_that_a_group_shares_are_halved_too(strategy, sizes) -> None:
    """By the members of a block alike, else the plan were refused; causes of the step's seconds add up to it."""
    _, whole = proposal(strategy, None, tp=4, **sizes)
    planner, halves = proposal(strategy, BesideHalves(), tp=4, **sizes)
    plan = halves.plan
    validate_plan(plan)
    packs = [pack for one in plan.pack_plans for pack in (*one.forward, *one.backward)]
    assert any(pack.first_rows and pack.slices[0].cp > 1 for pack in packs)
    assert plan.predicted.step_time_s < whole.plan.predicted.step_time_s
    assert 0 < plan.predicted.tensor_hidden_s < plan.predicted.tensor_s
    split = split_planned_step(plan, planner.costs)
    assert split.total_s() == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_packs_round_a_ring_are_computed_in_one_go() -> None:
    _, found = proposal("balanced", BesideHalves(), tp=4, cp=2, exchange="ring")
    assert num_halved(found.plan) == 0
    assert found.plan.predicted.tensor_s == 0


def test_a_search_that_prices_halves_finds_larger_packs_and_a_shorter_step() -> None:
    """Than the same search that prices packs in one go, both as they run, where turns keep the device too."""
    planner, _ = proposal("balanced", BesideHalves(turns_s=1.5e-4, host_turns_s=0.0), tp=8, pp=2)
    lengths = np.array(LENGTHS)
    problem = StepProblem(np.arange(len(lengths)), lengths, planner.costs, None, PlanOptions(max_pack_tokens=32_768))
    ((_, whole),) = searched([problem])
    ((_, halved),) = searched_as_if_halved([problem], searched)
    one = as_run(problem, whole.choices()[0].candidate)
    other = as_run(problem, in_one_go(problem, halved.choices()[0]))
    assert other.forward.num_packs < one.forward.num_packs
    assert other.makespan_s < one.makespan_s
    assert other.forward.num_slices >= len(lengths)


def test_longest_documents_are_halved_though_they_are_offloaded() -> None:
    """Memory for a few layers' activations: what does not fit waits in host memory, and its packs are halved too."""
    model, layout, cluster = model_from("llama-7b"), even_layout(32, tp=8), cluster_from("h100x8")
    coefficients = analytic_coefficients(model, cluster, layout)
    planner = StepPlanner(
        model, coefficients, layout, 20 * 2**30, PlanOptions(max_pack_tokens=65_536, policy="choose"), host="unlimited"
    )
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n) for i, n in enumerate([65_536, 40_000, 900]))
    plan = planner.propose(0, documents, "balanced").plan
    validate_plan(plan)
    (packs,) = plan.pack_plans
    assert "offload" in packs.policies.values()
    assert any(
        pack.first_rows and packs.policies.get(piece.doc_id) == "offload"
        for pack in packs.backward
        for piece in pack.slices
    )
