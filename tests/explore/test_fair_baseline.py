"""`best_fit` in the windows that suit it best: what others are compared with, and what the headline says of it."""

import msgspec
import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.explore.batches import BatchRule, planned_steps
from evenload.explore.evaluate import StrategyPlanners, best_window, evaluate_strategies, headline, with_window
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.types.layout import even_layout


def make_planner(window_tokens: int = 4096, cap: int | None = None, dp: int = 2, pp: int = 3) -> StepPlanner:
    options = PlanOptions(max_pack_tokens=window_tokens, candidates=3)
    return StepPlanner(
        sample_model(), sample_coefficients(), even_layout(3, dp=dp, pp=pp), cap, options, host="unlimited"
    )


def batches(steps: int = 2, longest: int = 300):
    lengths = np.random.default_rng(0).integers(1, longest, 64)
    return BatchRule(num_documents=20, context=4096).sample(lengths, steps=steps, seed=0)


def mean_s(planner: StepPlanner, window_tokens: int) -> float:
    proposals, _, _ = planned_steps(with_window(planner, window_tokens), batches(), "best_fit")
    return float(np.mean([one.plan.predicted.step_time_s for one in proposals]))


def test_a_pipeline_wants_more_micro_batches_than_the_largest_windows_make() -> None:
    """All documents of a replica in one window leave three stages to wait for each other."""
    planner = make_planner()
    judged = best_window(planner, batches())
    assert judged is not None
    window = judged.window_tokens
    assert window < 4096
    assert judged.mean_step_time_s == mean_s(planner, window)
    assert all(mean_s(planner, window) <= mean_s(planner, 4096 >> k) for k in range(5))


def test_the_users_own_window_is_tried() -> None:
    """Halvings and what lies between them never come to it."""
    usual = best_window(make_planner(), batches())
    assert usual is not None
    times_s = {window: mean_s(make_planner(), window) for window in range(150, 1300, 37)}
    own = min(times_s, key=times_s.__getitem__)
    assert times_s[own] < usual.mean_step_time_s
    judged = best_window(with_window(make_planner(), own), batches())
    assert judged is not None
    assert judged.mean_step_time_s <= times_s[own]


def test_factors_are_over_the_baseline_and_over_what_was_asked_for() -> None:
    found = evaluate_strategies(StrategyPlanners(planner=make_planner()), batches(), ["best_fit", "auto"])
    best_fit, auto = found.results
    baseline = found.baseline
    assert baseline is not None
    judged = best_window(make_planner(), batches())
    assert judged is not None
    assert baseline.window_tokens == judged.window_tokens
    times = [one.mean_step_time_s or 0.0 for one in (best_fit, baseline, auto)]
    assert times[0] > times[1] >= times[2]
    assert best_fit.speedup_over_baseline == pytest.approx(times[1] / times[0])
    assert auto.speedup_over_baseline == pytest.approx(times[1] / times[2])
    assert auto.speedup_over_best_fit == pytest.approx(times[0] / times[2])
    assert baseline.speedup_over_baseline == 1.0
    assert evaluate_strategies(StrategyPlanners(planner=make_planner()), batches(), ["auto"]).baseline is None


def test_headline_has_the_best_its_factor_and_what_the_baseline_loses_more_to() -> None:
    found = evaluate_strategies(StrategyPlanners(planner=make_planner()), batches(), ["best_fit", "auto"])
    said = headline(found)
    assert said is not None
    auto, baseline = found.results[1], found.baseline
    assert baseline is not None
    assert baseline.time_split is not None
    assert auto.time_split is not None
    assert (said.best, said.factor) == ("auto", auto.speedup_over_baseline)
    assert said.reasons
    lost, kept = dict(baseline.time_split.parts()), dict(auto.time_split.parts())
    more = {cause: lost[cause] - kept[cause] for cause in lost if cause != "useful work"}
    assert [one.cause for one in said.reasons] == sorted(more, key=more.__getitem__, reverse=True)[: len(said.reasons)]
    for one in said.reasons:
        assert one.baseline_share == pytest.approx(lost[one.cause] / baseline.time_split.total_s())
    nothing_fits = evaluate_strategies(StrategyPlanners(planner=make_planner(cap=1000)), batches(), ["best_fit"])
    assert headline(nothing_fits) is None
    msgspec.json.encode(said)
