"""Layouts ranked for strategies, each in its own best one, within a time; large clusters judged on a part."""

import dataclasses

import numpy as np
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import host_memory
from evenload.data.hub import model_from
from evenload.explore.batches import BatchRule
from evenload.explore.evaluate import StrategyPlanners, evaluate_strategies
from evenload.explore.layout_search import (
    FINAL_CANDIDATES,
    FINALISTS,
    PLAINER_SHARE,
    LayoutSearch,
    best_baseline_planners,
    layout_sizes,
    layouts_of,
    part_coefficients,
    with_virtual_stages,
)
from evenload.explore.stage_layers import balanced_layout
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.auto import AutoOptions
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from evenload.types.text import format_bytes

MODEL = model_from("llama-7b")
OPTIONS = PlanOptions(max_pack_tokens=8192, candidates=3, strategies=(AutoOptions(max_candidates=16),))


def search_on(
    cluster_name: str = "h100x4", steps: int = 1, documents: int = 32, memory_bytes: int | None = None
) -> LayoutSearch:
    cluster = cluster_from(cluster_name)
    lengths = np.random.default_rng(0).lognormal(7, 1.3, 4000).astype(np.int64) + 1
    rule = BatchRule(num_documents=documents, context=8192, overlong="truncate")
    return LayoutSearch(
        model=MODEL,
        cluster=cluster,
        batches=rule.sample(lengths, steps=steps, seed=0),
        coefficients_of=lambda layout: analytic_coefficients(MODEL, cluster, layout),
        options=OPTIONS,
        memory_bytes=memory_bytes or cluster.device.usable_bytes,
        host=host_memory(cluster),
    )


def test_every_layout_uses_all_devices_and_none_is_twice() -> None:
    layouts = layouts_of(MODEL, cluster_from("h100x16"))
    assert all(layout.world_size == 16 and layout.tp <= 8 for layout in layouts)
    sizes = [tuple(layout_sizes(layout).values()) for layout in layouts]
    assert len(set(sizes)) == len(sizes)
    assert {(16, 1, 1, 1, 1), (2, 1, 8, 1, 1), (2, 1, 4, 2, 1), (1, 4, 4, 1, 1)} <= set(sizes)


def test_fastest_first_and_the_first_is_what_planning_it_gives() -> None:
    search = search_on(steps=2)
    results = search.rank()
    finalists = results[:FINALISTS]
    assert {result.layout["virtual"] for result in results if result.num_batches == 2} == {1, 2, 4, 8}
    times = [result.mean_step_time_s for result in finalists]
    assert all(result.feasible and result.num_batches == 2 for result in finalists)
    assert times == sorted(times, key=lambda time_s: time_s or 0.0)
    best = results[0].parallel_layout()
    options = OPTIONS.with_own(AutoOptions(max_candidates=FINAL_CANDIDATES))
    planner = StepPlanner(
        MODEL, search.coefficients_of(best), best, search.memory_bytes, options, host=host_memory(search.cluster)
    )
    again = [planner.plan(k, batch.documents, "auto").predicted.step_time_s for k, batch in enumerate(search.batches)]
    assert times[0] == pytest.approx(np.mean(again))


def test_what_is_out_says_which_rank_and_how_much() -> None:
    """44 GB devices: 4 replicas of a 7B model with its optimizer do not fit; pipelines of 4 do."""
    memory_bytes = 44 * 2**30
    results = search_on("a100x4", memory_bytes=memory_bytes).rank()
    (alone,) = [result for result in results if result.layout == {"dp": 4, "cp": 1, "pp": 1, "tp": 1, "virtual": 1}]
    assert not alone.feasible
    assert alone.mean_step_time_s is None
    needed, over = (format_bytes(alone.peak_memory_bytes - offered) for offered in (0, memory_bytes))  # type: ignore[operator]
    assert alone.why == f"weights and optimizer alone: pipeline rank 0 needs {needed}, {over} over"
    assert results[0].feasible
    fits = [result.feasible for result in results]
    assert fits == sorted(fits, reverse=True), "those that fit come first"


@pytest.mark.parametrize(
    ("model", "pp", "counts"),
    [("llama-7b", 4, [2, 4, 8]), ("qwen2.5-7b", 4, [2, 7]), ("llama-150b", 8, [2, 3, 4, 6, 12]), ("llama-7b", 1, [])],
)
def test_more_stages_a_rank_are_two_and_those_that_hold_as_many_layers(model, pp, counts) -> None:
    spec = model_from(model)
    result = list(with_virtual_stages(spec, even_layout(spec.num_layers, dp=2, pp=pp)))
    assert [layout.num_stages // pp for layout in result] == counts
    assert all(layout.is_even for layout in result[1:])
    assert {layout.world_size for layout in result} <= {2 * pp}


def test_every_strategy_is_judged_in_the_layout_that_suits_it() -> None:
    strategies, search = ("auto", "best_fit", "padded"), search_on()
    results = search.strategies(strategies, limit_s=1e9, clock=lambda: 0.0)
    assert [one.strategy for one in results] == list(strategies)
    for one in results:
        assert one.layouts == search.rank(one.strategy)
        assert (one.not_looked_at, one.planned + one.too_large + one.ruled_out) == (0, len(one.layouts))
        assert one.too_large == sum(result.why.startswith("weights and optimizer alone") for result in one.layouts)
    own = {one.strategy: search.planners(one.best) for one in results}
    baseline = best_baseline_planners(results[1].layouts, search.planners, search.batches)
    judged = evaluate_strategies(
        StrategyPlanners(planner=own["auto"].planner, own=own, baseline=baseline), search.batches, strategies
    )
    for one, row in zip(results, judged.results, strict=True):
        assert row.layout.items() <= one.best.layout.items()
        if one.strategy != "auto":  # which searches longer in the search
            assert row.mean_step_time_s == pytest.approx(one.best.mean_step_time_s)
    assert judged.baseline is not None
    assert judged.baseline.mean_step_time_s <= judged.results[1].mean_step_time_s


def test_what_the_bound_rules_out_is_none_of_the_best() -> None:
    """Layouts left out unplanned would not have come among the finalists. Of one document reductions of gradients,
    which are largest where replicas hold whole models, take longer than all that is computed."""
    search = search_on("h100x16", documents=1)
    results = search.rank("best_fit")
    out = [result for result in results if not result.is_planned and not result.is_too_large]
    assert out
    worst_s = [result.mean_step_time_s or 0.0 for result in results if result.feasible][7]
    tokens = [document.num_tokens for document in search.batches[0].documents]
    for result in out:
        assert result.why.startswith("no plan in it takes less than")
        sizes = result.parallel_layout()
        for layout in (sizes, balanced_layout(MODEL, search.coefficients_of(sizes), sizes, tokens)):
            planned = search.plan(layout, "best_fit", search.batches, OPTIONS)
            assert not planned.feasible or (planned.mean_step_time_s or 0.0) > worst_s


def test_a_part_stands_for_a_large_cluster(monkeypatch) -> None:
    """dp=128 with 1,024 documents judged as dp=16 with 128: time and memory of a rank nearly those of the whole."""
    layout = even_layout(32, dp=128, tp=8)
    search = search_on("h100x1024", documents=1024)
    (batch,), part = search.batches, search.part_planners(layout, search.batches, OPTIONS)
    assert part.stride == 8
    small_layout = part.planner.layout
    assert (small_layout.dp, small_layout.tp) == (16, 8)
    (of_part,) = part.batches or ()
    assert len(of_part.documents) == pytest.approx(128, abs=1)
    assert of_part.documents[0].doc_id < of_part.documents[-1].doc_id, "in arrival order"
    assert max(one.num_tokens for one in of_part.documents) == max(one.num_tokens for one in batch.documents)
    assert part.raised_bytes > 0
    expected = part_coefficients(search.coefficients_of(layout), layout, small_layout)
    assert part.planner.costs.coefficients == expected
    small = search.plan(layout, "balanced", search.batches, OPTIONS)
    (row,) = evaluate_strategies(search.planners(small), search.batches, ["balanced"]).results
    monkeypatch.setattr("evenload.explore.layout_search._stride", lambda layout, documents: 1)
    whole = search.plan(layout, "balanced", search.batches, OPTIONS)
    assert small.feasible
    assert whole.feasible
    assert (small.stride, whole.stride) == (8, 1)
    assert small.layout == whole.layout == layout_sizes(layout)
    assert small.mean_step_time_s == pytest.approx(whole.mean_step_time_s, rel=0.1)
    free = [search.memory_bytes - (one.peak_memory_bytes or 0) for one in (whole, small)]
    assert free[1] == pytest.approx(free[0], rel=0.1)
    (whole_row,) = evaluate_strategies(search.planners(whole), search.batches, ["balanced"]).results
    assert row.peak_memory_bytes == small.peak_memory_bytes
    assert row.num_packs_forward == pytest.approx(whole_row.num_packs_forward, rel=0.1)
    assert (whole_row.note, row.layout, row.dropped_tokens) == ("", whole_row.layout, whole_row.dropped_tokens)
    assert row.note.startswith("estimated on one of 8 replicas and documents")


def test_layouts_that_fit_are_found_without_a_search() -> None:
    search = dataclasses.replace(search_on(), memory_bytes=40 * 2**30)
    result = search.few("auto")
    assert result.layouts
    assert result.num_tried <= result.num_all == len(layouts_of(MODEL, search.cluster))
    times_s = [one.mean_step_time_s or 0.0 for one in result.layouts]
    for part in (times_s[1 : result.num_compared], times_s[result.num_compared :]):
        assert part == sorted(part)
    assert times_s[0] <= min(times_s[: result.num_compared]) * (1 + PLAINER_SHARE)
    assert all(one.feasible and one.peak_memory_bytes <= search.memory_bytes for one in result.layouts)  # type: ignore[operator]
