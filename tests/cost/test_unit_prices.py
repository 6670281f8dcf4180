"""Bounds of a step hold for every plan, and are reached where nothing else costs anything."""

import numpy as np
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.layer_counts import training_flops
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import layout_bound_seconds, physical_bound_seconds
from evenload.data.hub import model_from
from evenload.explore.batches import BatchRule
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


def test_the_physical_bound_is_all_flops_at_the_peak() -> None:
    layout = LAYOUTS[1]
    costs = PackCosts(MODEL, analytic_coefficients(MODEL, CLUSTER, layout), layout)
    flops = float(training_flops(MODEL, [3000, 500]).sum())
    assert physical_bound_seconds(costs, [3000, 500]) == pytest.approx(flops / (8 * CLUSTER.device.peak_flops_per_s))
