import functools
import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cost_samples
from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from evenload.types.plan import plan_digest

PIPELINED = [one.name for one in STRATEGIES.values() if not one.needs_one_stage]
LENGTH_TABLES = Path(__file__).parents[2] / "examples" / "lengths"


def tiny_planner(dp: int = 2, pp: int = 3, cap: int | None = None, tile: int = 1, **options) -> StepPlanner:
    fields = {"max_pack_tokens": 256, "candidates": 3, "fixed_exact": {"solver_time_limit_s": 0.2}, **options}
    return StepPlanner(
        sample_model(),
        sample_coefficients(attention_tile=tile),
        even_layout(3, dp=dp, pp=pp),
        cap,
        plan_options(fields),
        host="unlimited",
    )


documents = functools.partial(cost_samples.documents, first_id=100)
"""Ids that are no indices, so that one cannot pass for the other."""


def long_tailed(num_documents: int, context: int) -> np.ndarray:
    """A prefix of the real table is an unbiased sample."""
    with gzip.open(LENGTH_TABLES / "github_dirs.npy.gz") as file:
        return np.minimum(np.load(file)[:num_documents].astype(np.int64), context)


# Adversarial: single tokens, equal lengths, one giant, exactly the window, fewer documents than replicas.
LENGTHS = st.one_of(
    st.lists(st.integers(1, 256), max_size=24),
    st.lists(st.sampled_from([1, 255, 256]), max_size=12),
    st.lists(st.just(1), max_size=40),
    st.lists(st.integers(1, 4), max_size=30).map(lambda short: [256, *short]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(LENGTHS, st.sampled_from(PIPELINED), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 16]))
def test_every_plan_is_valid_and_keeps_the_token_limit(lengths, strategy, dp, pp, tile) -> None:
    planner = tiny_planner(dp, pp, tile=tile)
    proposal = planner.propose(3, documents(lengths), strategy)
    validate_plan(proposal.plan, max_pack_tokens=256)
    assert proposal.cap_violations == 0
    assert proposal.plan.num_label_tokens == sum(n - 1 for n in lengths)
    assert len(proposal.plan.predicted.per_replica_s) == dp
    bound = planner.costs.lower_bound_seconds(lengths)
    assert proposal.plan.predicted.step_time_s >= bound * (1 - 1e-12)


@settings(max_examples=30, deadline=None)
@given(
    LENGTHS,
    st.sampled_from(["asymmetric", "symmetric"]),
    st.sampled_from(["static", "list"]),
    st.sampled_from([1, 3, 20]),
    st.integers(20, 256),
)
def test_slimpack_options_are_kept(lengths, cuts, schedule, min_slice_tokens, limit) -> None:
    limit = max(limit, 2 * min_slice_tokens)
    planner = tiny_planner(
        2, 3, slimpack={"cuts": cuts}, schedule=schedule, min_slice_tokens=min_slice_tokens, max_pack_tokens=limit
    )
    plan = planner.propose(0, documents(lengths), "slimpack").plan
    validate_plan(plan, max_pack_tokens=limit)
    whole = {document.doc_id: document.num_tokens for document in plan.documents}
    for packs in plan.pack_plans:
        for pack in (*packs.forward, *packs.backward):
            for piece in pack.slices:
                assert piece.num_tokens >= min(min_slice_tokens, whole[piece.doc_id])
        if cuts == "symmetric":
            assert sorted(sorted(p.slices, key=str).__repr__() for p in packs.forward) == sorted(
                sorted(p.slices, key=str).__repr__() for p in packs.backward
            )


@pytest.mark.parametrize("strategy", PIPELINED)
def test_plans_are_deterministic(strategy) -> None:
    """Ranks plan for themselves and compare digests; a difference would hang the run."""
    lengths = np.random.default_rng(1).integers(1, 256, 60)
    plan = tiny_planner().plan(0, documents(lengths), strategy)
    again = tiny_planner().plan(0, documents(lengths), strategy)
    assert plan == again
    assert plan.digest == plan_digest(plan) != ""


def test_unknown_strategy_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'slimpack'"):
        tiny_planner().plan(0, documents([5]), "slimpak")


@pytest.mark.parametrize("strategy", ["padded", "best_fit", "balanced"])
def test_document_beyond_the_window_is_named(strategy) -> None:
    with pytest.raises(DataError, match="document 101 has 300 tokens, max_pack_tokens is 256"):
        tiny_planner().plan(0, documents([5, 300]), strategy)


def test_bidirectional_model_is_refused_by_slimpack_only() -> None:
    planner = StepPlanner(
        sample_model(causal=False), sample_coefficients(), even_layout(3), None, PlanOptions(), host="unlimited"
    )
    with pytest.raises(ConfigError, match="bidirectional"):
        planner.plan(0, documents([5]), "slimpack")
    validate_plan(planner.plan(0, documents([5, 7]), "balanced"))


def test_repeated_document_is_refused() -> None:
    with pytest.raises(DataError, match="document 100 appears 2 times"):
        tiny_planner().plan(0, documents([5]) * 2, "padded")


@pytest.mark.parametrize("strategy", PIPELINED)
def test_step_beyond_memory_is_infeasible_with_numbers(strategy) -> None:
    planner = tiny_planner(cap=1000)
    with pytest.raises(InfeasiblePlanError, match=rf"{strategy} needs [1-9].* KiB on pipeline rank"):
        planner.plan(0, documents([200, 100]), strategy)
    assert not planner.propose(0, documents([200, 100]), strategy).feasible


def test_slimpack_gives_up_time_to_fit_memory() -> None:
    """Memory, not balance, binds: a planner that looks at time only would refuse steps that can run."""
    lengths = [250, 240, 230, *[20] * 30]
    free = tiny_planner(dp=1).propose(0, documents(lengths), "slimpack")
    cap = int(free.plan.predicted.peak_memory_bytes * 0.8)
    tight = tiny_planner(dp=1, cap=cap).propose(0, documents(lengths), "slimpack")
    assert tight.feasible
    assert tight.plan.predicted.peak_memory_bytes <= cap < free.plan.predicted.peak_memory_bytes
    assert tight.plan.predicted.step_time_s >= free.plan.predicted.step_time_s


@pytest.mark.parametrize("num_documents", [512, 2048])
@pytest.mark.parametrize("context", [65_536, 131_072])
def test_slimpack_is_even_and_fastest_on_a_long_tail(num_documents: int, context: int) -> None:
    """max/mean pack time <= 1.05 forward and backward, without moving documents between steps."""
    model, layout = model_from("llama-7b"), even_layout(32, dp=8, pp=4)
    coefficients = analytic_coefficients(model, cluster_from("h100x32"), layout)
    planner = StepPlanner(model, coefficients, layout, None, PlanOptions(max_pack_tokens=context), host="unlimited")
    step = documents(long_tailed(num_documents, context))
    result = {name: planner.propose(0, step, name) for name in PIPELINED if not STRATEGIES[name].needs_solver}
    slimpack = result["slimpack"]
    assert slimpack.imbalance_forward <= 1.05
    assert slimpack.imbalance_backward <= 1.05
    assert slimpack.cap_violations == 0
    times = {name: proposal.plan.predicted.step_time_s for name, proposal in result.items()}
    assert sorted(times, key=times.__getitem__)[:2] == ["auto", "slimpack"]
    assert times["padded"] > times["best_fit"]
