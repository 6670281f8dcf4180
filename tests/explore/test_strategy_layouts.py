"""Every strategy in its own best layout, within a time; large clusters judged on a part."""

import msgspec
import numpy as np
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.explore.batches import BatchRule
from evenload.explore.evaluate import StrategyPlanners, evaluate_strategies
from evenload.explore.layout_search import (
    coarse_coefficients,
    coarse_problem,
    planned_layout,
    search_layouts,
)
from evenload.explore.stage_layers import balanced_layout, usable_bytes
from evenload.explore.strategy_layouts import fair_planners, planners_in, search_strategies
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.auto import AutoOptions
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout

MODEL, CLUSTER = model_from("llama-7b"), cluster_from("h100x4")
OPTIONS = PlanOptions(max_pack_tokens=8192, candidates=3, strategies=(AutoOptions(max_candidates=16),))


def batches(steps: int = 1, documents: int = 32):
    lengths = np.random.default_rng(0).lognormal(7, 1.3, 4000).astype(np.int64) + 1
    rule = BatchRule(num_documents=documents, context=8192, overlong="truncate")
    return rule.sample(lengths, steps=steps, seed=0)


def coefficients_of(layout, cluster=CLUSTER):
    return analytic_coefficients(MODEL, cluster, layout)


def search(strategies, limit_s=1e9, clock=lambda: 0.0):
    return search_strategies(
        MODEL, CLUSTER, batches(), coefficients_of, strategies, OPTIONS, limit_s=limit_s, clock=clock
    )


def test_every_strategy_is_judged_in_the_layout_that_suits_it() -> None:
    strategies = ("auto", "best_fit", "padded")
    found = search(strategies)
    assert [one.strategy for one in found] == list(strategies)
    for one in found:
        alone = search_layouts(MODEL, CLUSTER, batches(), coefficients_of, strategy=one.strategy, options=OPTIONS)
        assert [msgspec.to_builtins(result) for result in one.layouts] == [msgspec.to_builtins(r) for r in alone]
        assert (one.not_looked_at, one.planned + one.too_large + one.ruled_out) == (0, len(one.layouts))
        assert one.too_large == sum(result.why.startswith("weights and optimizer alone") for result in one.layouts)

    def planners_of(result) -> StrategyPlanners:
        coefficients = coefficients_of(result.parallel_layout())
        host = host_memory(CLUSTER)
        room_bytes = usable_bytes(CLUSTER)
        return planners_in(result, MODEL, coefficients, batches(), OPTIONS, room_bytes=room_bytes, host=host)

    own = {one.strategy: planners_of(one.best) for one in found}
    baseline = fair_planners(found[1].layouts, planners_of, batches())
    judged = evaluate_strategies(
        StrategyPlanners(planner=own["auto"].planner, own=own, baseline=baseline), batches(), strategies
    )
    for one, row in zip(found, judged.results, strict=True):
        assert row.layout.items() <= one.best.layout.items()
        if one.strategy != "auto":  # which searches longer in the search
            assert row.mean_step_time_s == pytest.approx(one.best.mean_step_time_s)
    assert judged.baseline is not None
    assert judged.baseline.mean_step_time_s <= judged.results[1].mean_step_time_s


def test_what_the_bound_rules_out_is_none_of_the_best() -> None:
    """Layouts left out unplanned would not have come among the finalists. Of one document sums of gradients, which are
    largest where replicas hold whole models, take longer than all that is computed."""
    cluster, few = cluster_from("h100x16"), batches(documents=1)
    results = search_layouts(
        MODEL,
        cluster,
        few,
        lambda layout: coefficients_of(layout, cluster),
        strategy="best_fit",
        options=OPTIONS,
    )
    out = [result for result in results if not result.is_planned and not result.is_too_large]
    assert out
    worst_s = [result.mean_step_time_s or 0.0 for result in results if result.feasible][7]
    for result in out:
        assert result.why.startswith("no plan in it takes less than")
        sizes = result.parallel_layout()
        tokens = [document.num_tokens for document in few[0].documents]
        for layout in (sizes, balanced_layout(MODEL, coefficients_of(sizes, cluster), sizes, tokens)):
            planned = planned_layout(
                MODEL, cluster, layout, few, lambda one: coefficients_of(one, cluster), "best_fit", OPTIONS
            )
            assert not planned.feasible or (planned.mean_step_time_s or 0.0) > worst_s


def test_a_part_stands_for_a_large_cluster() -> None:
    """dp=128 with 512 documents judged as dp=16 with 64: time and memory of a rank nearly those of the whole."""
    cluster = cluster_from("h100x1024")
    layout = even_layout(32, dp=128, tp=8)
    (batch,) = batches(documents=1024)
    room_bytes = usable_bytes(cluster)
    part = coarse_problem(MODEL, layout, batch, room_bytes)
    assert part.stride == 8
    assert (part.layout.dp, part.layout.tp) == (16, 8)
    assert len(part.batch.documents) == pytest.approx(128, abs=1)
    assert part.batch.documents[0].doc_id < part.batch.documents[-1].doc_id, "in arrival order"
    longest = max(document.num_tokens for document in batch.documents)
    assert max(document.num_tokens for document in part.batch.documents) == longest

    def planned(of_layout, documents, raised_bytes):
        coefficients = coarse_coefficients(coefficients_of(layout, cluster), layout, of_layout)
        found = planned_layout(
            MODEL, cluster, of_layout, [documents], lambda _: coefficients, "balanced", OPTIONS, raised_bytes
        )
        assert found.feasible, found.why
        return found

    whole, small = planned(layout, batch, 0), planned(part.layout, part.batch, part.raised_bytes)
    assert small.mean_step_time_s == pytest.approx(whole.mean_step_time_s, rel=0.1)
    assert part.raised_bytes > 0
    free = [room_bytes - (one.peak_memory_bytes or 0) for one in (whole, small)]
    assert free[1] == pytest.approx(free[0], rel=0.1)

    (row,), (of_part,) = (
        evaluate_strategies(
            planners_in(
                found,
                MODEL,
                coefficients_of(layout, cluster),
                [batch],
                OPTIONS,
                room_bytes=room_bytes,
                host=host_memory(cluster),
            ),
            [batch],
            ["balanced"],
        ).results
        for found in (whole, msgspec.structs.replace(small, layout=whole.layout, stride=part.stride))
    )
    assert of_part.peak_memory_bytes == small.peak_memory_bytes
    assert of_part.num_packs_forward == pytest.approx(row.num_packs_forward, rel=0.1)
    assert (row.note, of_part.layout, of_part.dropped_tokens) == ("", row.layout, row.dropped_tokens)
    assert of_part.note.startswith("estimated on one of 8 replicas and documents")
