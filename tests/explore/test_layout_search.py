import msgspec
import numpy as np
import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.host_memory import host_memory
from evenload.data.hub import model_from
from evenload.explore.batches import BatchRule
from evenload.explore.layout_search import (
    FINAL_CANDIDATES,
    FINALISTS,
    layout_sizes,
    layouts_of,
    search_layouts,
    with_virtual_stages,
)
from evenload.explore.stage_layers import usable_bytes
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.auto import AutoOptions
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout
from evenload.types.text import format_bytes

MODEL, CLUSTER = model_from("llama-7b"), cluster_from("h100x4")
OPTIONS = PlanOptions(max_pack_tokens=8192, candidates=3, strategies=(AutoOptions(max_candidates=16),))


def batches(steps: int = 2):
    lengths = np.random.default_rng(0).lognormal(7, 1.3, 200).astype(np.int64) + 1
    return BatchRule(num_documents=32, context=8192, overlong="truncate").sample(lengths, steps=steps, seed=0)


def search(cluster=CLUSTER, **options):
    return search_layouts(
        MODEL,
        cluster,
        batches(),
        lambda layout: analytic_coefficients(MODEL, cluster, layout),
        options=msgspec.structs.replace(OPTIONS, **options),
    )


def test_every_layout_uses_all_devices_and_none_is_twice() -> None:
    layouts = layouts_of(MODEL, cluster_from("h100x16"))
    assert all(layout.world_size == 16 and layout.tp <= 8 for layout in layouts)
    sizes = [tuple(layout_sizes(layout).values()) for layout in layouts]
    assert len(set(sizes)) == len(sizes)
    assert {(16, 1, 1, 1, 1), (2, 1, 8, 1, 1), (2, 1, 4, 2, 1), (1, 4, 4, 1, 1)} <= set(sizes)


def test_fastest_first_and_the_first_is_what_planning_it_gives() -> None:
    results = search()
    finalists = results[:FINALISTS]
    assert {result.layout["virtual"] for result in results if result.num_batches == 2} == {1, 2, 4, 8}
    times = [result.mean_step_time_s for result in finalists]
    assert all(result.feasible and result.num_batches == 2 for result in finalists)
    assert times == sorted(times, key=lambda time_s: time_s or 0.0)
    best = results[0].parallel_layout()
    options = OPTIONS.with_own(AutoOptions(max_candidates=FINAL_CANDIDATES))
    planner = StepPlanner(
        MODEL,
        analytic_coefficients(MODEL, CLUSTER, best),
        best,
        usable_bytes(CLUSTER),
        options,
        host=host_memory(CLUSTER),
    )
    again = [planner.plan(k, batch.documents, "auto").predicted.step_time_s for k, batch in enumerate(batches())]
    assert times[0] == pytest.approx(np.mean(again))


def test_what_is_out_says_which_rank_and_how_much() -> None:
    """40 GB devices: 4 replicas of a 7B model with its optimizer do not fit; pipelines of 4 do."""
    cluster = cluster_from("a100x4")
    small = msgspec.structs.replace(
        cluster,
        device=msgspec.structs.replace(
            cluster.device, memory_bytes=44 * 2**30, reserved_bytes=0, fragmentation_share=0.0
        ),
    )
    results = search(small)
    (alone,) = [result for result in results if result.layout == {"dp": 4, "cp": 1, "pp": 1, "tp": 1, "virtual": 1}]
    assert not alone.feasible
    assert alone.mean_step_time_s is None
    needed, over = (format_bytes(alone.peak_memory_bytes - room) for room in (0, 44 * 2**30))  # type: ignore[operator]
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
    found = list(with_virtual_stages(spec, even_layout(spec.num_layers, dp=2, pp=pp)))
    assert [layout.num_stages // pp for layout in found] == counts
    assert all(layout.is_even for layout in found[1:])
    assert {layout.world_size for layout in found} <= {2 * pp}
