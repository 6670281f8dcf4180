"""Figures of strategies on sampled batches, best_fit in the windows that suit it best, and why others are slower."""

import msgspec
import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule, plan_steps
from evenload.explore.evaluate import (
    Evaluation,
    StrategyPlanners,
    StrategyResult,
    best_window,
    evaluate_strategies,
    with_window,
)
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.types.layout import even_layout
from evenload.types.timeline import TimeSplit

FIXED_KEYS = [
    *("name", "feasible", "why", "step_time_s", "mean_step_time_s", "step_time_interval_s"),
    *("lower_bound_s", "fraction_of_bound", "speedup_over_best_fit", "tokens_per_s_per_device"),
    *("bubble_fraction", "imbalance_forward", "imbalance_backward", "imbalance_dp", "max_pack_tokens"),
    *("cap_violations", "peak_memory_bytes", "peak_host_bytes_per_node", "num_packs_forward", "num_packs_backward"),
    *("plan_time_s", "deferred_tokens"),
    *("dropped_tokens", "mean_token_delay_steps", "layout"),
    *("cuts", "schedule", "sharding", "note", "time_split", "layout_decisions"),
    *("physical_bound_s", "mfu", "layout_bound_s", "fraction_of_layout_bound"),
    *("speedup_over_baseline", "window_tokens"),
]


def make_planner(max_pack_tokens: int = 256, cap: int | None = None, **model) -> StepPlanner:
    options = PlanOptions(max_pack_tokens=max_pack_tokens, candidates=3)
    layout, costs = even_layout(3, dp=2, pp=3), sample_coefficients()
    return StepPlanner(sample_model(**model), costs, layout, cap, options, host="unlimited")


def evaluated(planner: StepPlanner, sampled, strategies: list[str]) -> Evaluation:
    return evaluate_strategies(StrategyPlanners(planner=planner), sampled, strategies)


def batches(steps: int = 2, context: int = 256):
    lengths = np.random.default_rng(0).integers(1, 300, 64)
    return BatchRule(num_documents=20, context=context, overlong="truncate").sample(lengths, steps=steps, seed=0)


def test_time_split_adds_up_to_the_mean_step_time_and_holds_the_bound() -> None:
    """Table, bound and loss split speak of the same seconds; `wlb` defers documents, all are trained at the end."""
    results = evaluated(make_planner(), batches(3), ["padded", "wlb", "slimpack", "auto"])
    for result in results.results:
        assert result.time_split is not None
        assert result.time_split.total_s() == pytest.approx(result.mean_step_time_s, rel=1e-9)
        assert result.time_split.useful_s == pytest.approx(result.lower_bound_s, rel=1e-9)
        assert result.time_split.useful_s / result.mean_step_time_s == pytest.approx(result.fraction_of_bound)
    assert set(msgspec.to_builtins(results.results[0])["time_split"]) == set(TimeSplit.__struct_fields__)


def test_result_has_exactly_the_fixed_keys() -> None:
    assert list(StrategyResult.__struct_fields__) == FIXED_KEYS


def test_figures_are_consistent_with_each_other() -> None:
    results = evaluated(make_planner(), batches(), ["padded", "best_fit", "slimpack"])
    by_name = {result.name: result for result in results.results}
    best_fit, slimpack = by_name["best_fit"], by_name["slimpack"]
    assert best_fit.speedup_over_best_fit == 1.0
    assert slimpack.speedup_over_best_fit == pytest.approx(best_fit.mean_step_time_s / slimpack.mean_step_time_s)
    assert slimpack.mean_step_time_s == pytest.approx(np.mean(slimpack.step_time_s))
    assert slimpack.fraction_of_bound == pytest.approx(slimpack.lower_bound_s / slimpack.mean_step_time_s)
    tokens = sum(d.num_tokens for batch in batches() for d in batch.documents)
    assert slimpack.tokens_per_s_per_device == pytest.approx(tokens / sum(slimpack.step_time_s) / 6)
    assert slimpack.dropped_tokens == sum(batch.dropped_tokens for batch in batches()) > 0
    assert results.best == min(by_name, key=lambda name: by_name[name].mean_step_time_s)
    assert msgspec.to_builtins(slimpack)["layout"] == {"dp": 2, "cp": 1, "pp": 3, "tp": 1}


def test_beyond_memory_keeps_figures_but_is_not_best() -> None:
    result = evaluated(make_planner(cap=1000), batches(1), ["padded", "slimpack"])
    assert result.best is None
    assert all(not r.feasible and r.why and r.mean_step_time_s for r in result.results)


def test_strategy_that_does_not_apply_does_not_hide_the_others() -> None:
    result = evaluated(make_planner(causal=False), batches(1), ["slimpack", "balanced"])
    slimpack, balanced = result.results
    assert (slimpack.feasible, slimpack.step_time_s, slimpack.mean_step_time_s) == (False, (), None)
    assert "bidirectional" in slimpack.why
    assert result.best == balanced.name == "balanced"
    assert result.proposals["slimpack"] == ()


def test_misspelt_strategy_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        evaluated(make_planner(), batches(1), ["balanced", "bestfit"])


def mean_s(planner: StepPlanner, window_tokens: int) -> float:
    proposals, _, _ = plan_steps(with_window(planner, window_tokens), batches(context=4096), "best_fit")
    return float(np.mean([one.plan.predicted.step_time_s for one in proposals]))


def test_a_pipeline_wants_more_micro_batches_than_the_largest_windows_make() -> None:
    """All documents of a replica in one window leave three stages to wait for each other."""
    planner = make_planner(4096)
    judged = best_window(planner, batches(context=4096))
    assert judged is not None
    window = judged.window_tokens
    assert window < 4096
    assert judged.mean_step_time_s == mean_s(planner, window)
    assert all(mean_s(planner, window) <= mean_s(planner, 4096 >> k) for k in range(5))


def test_the_users_own_window_is_tried() -> None:
    """Halvings and what lies between them never come to it."""
    usual = best_window(make_planner(4096), batches(context=4096))
    assert usual is not None
    times_s = {window: mean_s(make_planner(4096), window) for window in range(150, 1300, 37)}
    own = min(times_s, key=times_s.__getitem__)
    assert times_s[own] < usual.mean_step_time_s
    judged = best_window(with_window(make_planner(4096), own), batches(context=4096))
    assert judged is not None
    assert judged.mean_step_time_s <= times_s[own]


def test_factors_are_over_the_baseline_and_over_what_was_asked_for() -> None:
    result = evaluated(make_planner(4096), batches(context=4096), ["best_fit", "auto"])
    best_fit, auto = result.results
    baseline = result.baseline
    assert baseline is not None
    judged = best_window(make_planner(4096), batches(context=4096))
    assert judged is not None
    assert baseline.window_tokens == judged.window_tokens
    times = [one.mean_step_time_s or 0.0 for one in (best_fit, baseline, auto)]
    assert times[0] > times[1] >= times[2]
    assert best_fit.speedup_over_baseline == pytest.approx(times[1] / times[0])
    assert auto.speedup_over_baseline == pytest.approx(times[1] / times[2])
    assert auto.speedup_over_best_fit == pytest.approx(times[0] / times[2])
    assert baseline.speedup_over_baseline == 1.0
    assert evaluated(make_planner(4096), batches(context=4096), ["auto"]).baseline is None
