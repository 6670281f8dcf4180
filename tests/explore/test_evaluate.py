import msgspec
import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule
from evenload.explore.evaluate import StrategyPlanners, StrategyResult, evaluate_strategies
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.types.layout import even_layout
from evenload.types.timeline import TimeSplit

FIXED_KEYS = [
    *("name", "feasible", "why", "step_time_s", "mean_step_time_s", "step_time_interval_s"),
    *("lower_bound_s", "fraction_of_bound", "speedup_over_best_fit", "tokens_per_s_per_device"),
    "bubble_fraction",
    *("imbalance_forward", "imbalance_backward", "imbalance_dp", "max_pack_tokens", "cap_violations"),
    *(
        "peak_memory_bytes",
        "peak_host_bytes_per_node",
        "num_packs_forward",
        "num_packs_backward",
        "plan_time_s",
        "deferred_tokens",
    ),
    *("dropped_tokens", "mean_token_delay_steps", "layout"),
    *("cuts", "schedule", "sharding", "note", "time_split", "layout_decisions"),
    *("physical_bound_s", "mfu", "layout_bound_s", "fraction_of_layout_bound"),
    *("speedup_over_baseline", "window_tokens"),
]


def make_planner(cap: int | None = None, **model) -> StepPlanner:
    return StepPlanner(
        sample_model(**model),
        sample_coefficients(),
        even_layout(3, dp=2, pp=3),
        cap,
        PlanOptions(max_pack_tokens=256, candidates=3),
        host="unlimited",
    )


def batches(steps: int = 2):
    lengths = np.random.default_rng(0).integers(1, 300, 64)
    return BatchRule(num_documents=20, context=256, overlong="truncate").sample(lengths, steps=steps, seed=0)


def test_time_split_adds_up_to_the_mean_step_time_and_holds_the_bound() -> None:
    """Table, bound and loss split speak of the same seconds; `wlb` defers documents, all are trained at the end."""
    found = evaluate_strategies(
        StrategyPlanners(planner=make_planner()), batches(3), ["padded", "wlb", "slimpack", "auto"]
    )
    for result in found.results:
        assert result.time_split is not None
        assert result.time_split.total_s() == pytest.approx(result.mean_step_time_s, rel=1e-9)
        assert result.time_split.useful_s == pytest.approx(result.lower_bound_s, rel=1e-9)
        assert result.time_split.useful_s / result.mean_step_time_s == pytest.approx(result.fraction_of_bound)
    assert set(msgspec.to_builtins(found.results[0])["time_split"]) == set(TimeSplit.__struct_fields__)


def test_result_has_exactly_the_fixed_keys() -> None:
    assert list(StrategyResult.__struct_fields__) == FIXED_KEYS


def test_figures_are_consistent_with_each_other() -> None:
    found = evaluate_strategies(StrategyPlanners(planner=make_planner()), batches(), ["padded", "best_fit", "slimpack"])
    by_name = {result.name: result for result in found.results}
    best_fit, slimpack = by_name["best_fit"], by_name["slimpack"]
    assert best_fit.speedup_over_best_fit == 1.0
    assert slimpack.speedup_over_best_fit == pytest.approx(best_fit.mean_step_time_s / slimpack.mean_step_time_s)
    assert slimpack.mean_step_time_s == pytest.approx(np.mean(slimpack.step_time_s))
    assert slimpack.fraction_of_bound == pytest.approx(slimpack.lower_bound_s / slimpack.mean_step_time_s)
    tokens = sum(d.num_tokens for batch in batches() for d in batch.documents)
    assert slimpack.tokens_per_s_per_device == pytest.approx(tokens / sum(slimpack.step_time_s) / 6)
    assert slimpack.dropped_tokens == sum(batch.dropped_tokens for batch in batches()) > 0
    assert found.best == min(by_name, key=lambda name: by_name[name].mean_step_time_s)
    assert msgspec.to_builtins(slimpack)["layout"] == {"dp": 2, "cp": 1, "pp": 3, "tp": 1}


def test_beyond_memory_keeps_figures_but_is_not_best() -> None:
    found = evaluate_strategies(StrategyPlanners(planner=make_planner(cap=1000)), batches(1), ["padded", "slimpack"])
    assert found.best is None
    assert all(not r.feasible and r.why and r.mean_step_time_s for r in found.results)


def test_strategy_that_does_not_apply_does_not_hide_the_others() -> None:
    found = evaluate_strategies(
        StrategyPlanners(planner=make_planner(causal=False)), batches(1), ["slimpack", "balanced"]
    )
    slimpack, balanced = found.results
    assert (slimpack.feasible, slimpack.step_time_s, slimpack.mean_step_time_s) == (False, (), None)
    assert "bidirectional" in slimpack.why
    assert found.best == balanced.name == "balanced"
    assert found.proposals["slimpack"] == ()


def test_misspelt_strategy_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        evaluate_strategies(StrategyPlanners(planner=make_planner()), batches(1), ["balanced", "bestfit"])
