"""The search of `auto` ends when it has taken as long as the step it plans, by the price of its trials: at the same
trial on every machine, with a plan that is valid, within memory, and says so."""

import time

import numpy as np
import pytest

from cost_samples import documents
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.planning import candidates
from evenload.planning.planner import CUT_SHORT_NOTE, Proposal, StepPlanner
from evenload.planning.problem import PRICE_OF_DOCUMENT_S, PRICE_OF_TRIAL_S, Effort, PlanOptions
from evenload.planning.strategies.auto import AutoOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from evenload.types.plan import decode_plan, encode_plan

MIDDLE = 0.005  # A share that ends the search of these lengths in its middle
LENGTHS = np.minimum(np.random.default_rng(3).lognormal(np.log(1200), 1.4, 96).astype(np.int64) + 1, 16_384)


def planner_with(share: float, model: str = "llama-7b") -> StepPlanner:
    spec, cluster = model_from(model), cluster_from("h100x8")
    layout = even_layout(spec.num_layers, dp=2, pp=4)
    options = PlanOptions(max_pack_tokens=16_384, dp_merge=True, strategies=(AutoOptions(planning_share=share),))
    costs = analytic_coefficients(spec, cluster, layout)
    return StepPlanner(spec, costs, layout, cluster.device.usable_bytes, options, host=host_memory(cluster))


def proposed(share: float, strategy: str = "auto") -> Proposal:
    return planner_with(share).propose(0, documents(LENGTHS), strategy)


def test_effort_is_the_price_of_trials_and_the_search_for_a_plan_within_memory_goes_on() -> None:
    effort = Effort(share=0.5)
    effort.add(10, 100)
    price_s = 10 * PRICE_OF_TRIAL_S + 1000 * PRICE_OF_DOCUMENT_S
    assert effort.seconds == pytest.approx(price_s)
    assert effort.may_go_on((0, 2.01 * price_s))
    assert effort.may_go_on((1, 0.0))
    assert not effort.is_cut_short
    assert not effort.may_go_on((0, 1.99 * price_s))
    assert effort.is_cut_short


def test_a_search_that_takes_less_than_its_step_is_whole() -> None:
    whole, endless = proposed(1.0), proposed(1e9)
    assert whole.plan == endless.plan
    assert not whole.plan.is_cut_short
    assert not whole.note


@pytest.mark.parametrize("share", [1e-9, MIDDLE])
def test_a_search_cut_short_gives_a_plan_within_memory_that_says_so(share: float) -> None:
    """And one that is as fast as any strategy of whole documents, all of which plan all the same."""
    result, whole = proposed(share), proposed(1.0)
    validate_plan(result.plan, max_pack_tokens=16_384)
    assert result.feasible
    assert result.plan.is_cut_short
    assert result.note == CUT_SHORT_NOTE
    assert whole.plan.predicted.step_time_s <= result.plan.predicted.step_time_s
    for one in STRATEGIES.values():
        if one.keeps_whole and not (one.needs_solver or one.needs_one_stage or one.changes_layout):
            other = proposed(share, one.name)
            assert not other.plan.is_cut_short, one.name
            if other.feasible:
                assert result.plan.predicted.step_time_s <= other.plan.predicted.step_time_s, one.name
    assert decode_plan(encode_plan(result.plan)) == result.plan
    assert decode_plan_file(encode_plan_file([result.plan]))[0].is_cut_short


def test_less_is_tried_with_a_smaller_share(monkeypatch: pytest.MonkeyPatch) -> None:
    rated, score = [], candidates._score_in_core

    def count(jobs) -> None:
        rated[-1] += sum(len(trials) for _, trials in jobs)
        score(jobs)

    monkeypatch.setattr(candidates, "_score_in_core", count)
    for share in (1e-9, MIDDLE, 1.0):
        rated.append(0)
        proposed(share)
    assert rated[0] < rated[1] < rated[2], rated


def test_plans_are_the_same_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock would end the search earlier where trials take longer."""
    fast = proposed(MIDDLE)
    score = candidates._score_in_core

    def slowly(jobs) -> None:
        time.sleep(0.02)
        score(jobs)

    monkeypatch.setattr(candidates, "_score_in_core", slowly)
    monkeypatch.setattr(candidates, "usable_cores", lambda: 1)
    slow = proposed(MIDDLE)
    assert fast.plan.is_cut_short
    assert slow.plan == fast.plan


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"auto\.planning_share is 0, must be above 0"):
        AutoOptions(planning_share=0)
