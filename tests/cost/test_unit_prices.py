"""Bounds of a step hold for every plan, and are reached where nothing else costs anything."""

import numpy as np
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.layer_counts import training_flops
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import layout_bound_seconds, physical_bound_seconds, sizes_bound_seconds
from evenload.data.hub import model_from
from evenload.explore.batches import BatchRule
from evenload.explore.layout_search import layouts_of
from evenload.explore.stage_layers import balanced_layout
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.types.cluster import cluster_from
from evenload.types.layout import ParallelLayout, even_layout, split_layout

MODEL, CLUSTER = model_from("qwen2.5-0.5b"), cluster_from("h100x8")
LAYOUTS = [
    even_layout(24, dp=8),
    even_layout(24, dp=2, pp=4),
    split_layout((9, 7, 6, 2), devices=None, dp=2, cp=1, pp=4, tp=1),
    even_layout(24, dp=2, tp=2, pp=2),
    even_layout(24, dp=2, cp=2, pp=2),
    split_layout((12, 12), devices=(3, 5), dp=1, cp=1, pp=2, tp=1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=ParallelLayout.describe)
def test_no_plan_is_faster_than_its_layout_allows(layout: ParallelLayout) -> None:
    coefficients = analytic_coefficients(MODEL, CLUSTER, layout)
    planner = StepPlanner(
        MODEL, coefficients, layout, None, PlanOptions(max_pack_tokens=8192, candidates=3), host="unlimited"
    )
    lengths = np.random.default_rng(0).lognormal(7, 1.2, 200).astype(np.int64) + 1
    (batch,) = BatchRule(num_documents=64, context=8192, overlong="truncate").sample(lengths, steps=1, seed=0)
    tokens = np.array([document.num_tokens for document in batch.documents])
    bounds_s = [
        physical_bound_seconds(planner.costs, tokens),
        planner.costs.lower_bound_seconds(tokens),
        layout_bound_seconds(planner.costs, tokens),
    ]
    assert bounds_s == sorted(bounds_s)
    for strategy in ("balanced",) if layout.has_wide_stages else ("best_fit", "slimpack", "auto"):
        step_s = planner.plan(0, batch.documents, strategy).predicted.step_time_s
        assert step_s > bounds_s[-1], strategy


def test_the_slowest_stage_is_the_bound_and_the_update_comes_after_it() -> None:
    """Of stages with 9, 7, 6 and 2 layers and the head on the last, none can be left to the others."""
    layout = LAYOUTS[2]
    costs = PackCosts(MODEL, analytic_coefficients(MODEL, CLUSTER, layout), layout)
    tokens = np.full(4000, 2000)
    slowest_s = float(costs.useful_stage_seconds(tokens).max()) / 2
    assert layout_bound_seconds(costs, tokens) == pytest.approx(slowest_s + costs.optimizer_seconds())
    assert slowest_s > 1.05 * costs.lower_bound_seconds(tokens)


def test_the_bound_of_the_sizes_holds_however_layers_are_split() -> None:
    """llama3-8b's head is as dear as layers, so an even split of 32 layers over 16 ranks is slower than a plan in one
    by cost; what may leave the sizes out unplanned is below both, and below every other split's bound."""
    model, cluster = model_from("llama3-8b"), cluster_from("h100x64")
    (batch,) = BatchRule(num_documents=512, context=4096).sample(np.full(600, 4096), steps=1, seed=0)
    tokens = np.array([document.num_tokens for document in batch.documents])
    even = even_layout(32, dp=4, pp=16)
    coefficients = analytic_coefficients(model, cluster, even)
    balanced = balanced_layout(model, coefficients, even, tokens)
    planner = StepPlanner(model, coefficients, balanced, None, PlanOptions(max_pack_tokens=4096), host="unlimited")
    step_s = planner.plan(0, batch.documents, "best_fit").predicted.step_time_s
    assert step_s < layout_bound_seconds(PackCosts(model, coefficients, even), tokens)
    assert sizes_bound_seconds(model, coefficients, even, tokens) < step_s
    for even in layouts_of(model, cluster):
        coefficients = analytic_coefficients(model, cluster, even)
        splits = [even, balanced_layout(model, coefficients, even, tokens)]
        if 1 < even.pp <= 16:
            splits.append(even_layout(32, devices=None, dp=even.dp, cp=even.cp, pp=even.pp, tp=even.tp, virtual=2))
        bounds_s = [layout_bound_seconds(PackCosts(model, coefficients, split), tokens) for split in splits]
        found_s = sizes_bound_seconds(model, coefficients, even, tokens)
        assert found_s <= min(bounds_s) * (1 + 1e-9), even.describe()
        assert found_s > 0.5 * min(bounds_s), even.describe()


def test_the_physical_bound_is_all_flops_at_the_peak() -> None:
    layout = LAYOUTS[1]
    costs = PackCosts(MODEL, analytic_coefficients(MODEL, CLUSTER, layout), layout)
    flops = float(training_flops(MODEL, [3000, 500]).sum())
    assert physical_bound_seconds(costs, [3000, 500]) == pytest.approx(flops / (8 * CLUSTER.device.peak_flops_per_s))
