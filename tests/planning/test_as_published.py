"""`as_published`: one switch a strategy, and the row says what it ran."""

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule
from evenload.explore.evaluate import StrategyPlanners, evaluate_strategies
from evenload.planning.planner import StepPlanner
from evenload.planning.strategies.slimpack import SlimpackOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

LENGTHS = np.concatenate([np.full(40, 30), np.arange(10, 250, 12), [250, 240, 250]]).astype(np.int64)
LINK = LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0)


def row(strategy: str, layout: dict, steps: int = 1, **options):
    costs = sample_coefficients(intra_node=LINK, devices_per_node=8)
    request = plan_options({"max_pack_tokens": 256, "candidates": 3, "policy": "replay", **options})
    planner = StepPlanner(sample_model(), costs, even_layout(3, **layout), None, request, host="unlimited")
    batches = BatchRule(num_documents=48, num_tokens=None, context=256, overlong="error").sample(
        LENGTHS, steps=steps, seed=1
    )
    evaluation = evaluate_strategies(StrategyPlanners(planner=planner), batches, [strategy])
    for proposal in evaluation.proposals[strategy]:
        validate_plan(proposal.plan)
    return evaluation.results[0]


def test_slimpack_runs_asymmetric_cuts_in_the_static_order():
    result = row("slimpack", {"dp": 2, "pp": 3}, slimpack={"as_published": True})
    assert (result.cuts, result.schedule, result.sharding) == ("asymmetric", "static", "")
    assert "as published" in result.note
    free = row("slimpack", {"dp": 2, "pp": 3})
    assert free.mean_step_time_s <= result.mean_step_time_s
    assert not free.note
    with pytest.raises(ConfigError, match="cuts forward and backward packs on their own"):
        SlimpackOptions(as_published=True, cuts="symmetric")
    refused = row("slimpack", {"dp": 2, "pp": 3}, slimpack={"as_published": True}, schedule="list")
    assert "runs PackFlow's static order" in refused.why


def test_slimpack_shares_documents_only_above_a_replica_s_share():
    """The documents here are far below a replica's share of the work, so nothing is shared."""
    options = {"dp_merge": True, "dp_merge_threshold": 0.01}
    assert row("slimpack", {"dp": 2}, slimpack={"as_published": True}, **options).sharding == ""


def test_wlb_runs_its_queues_with_one_number_of_micro_batches():
    published = row("wlb", {"dp": 2, "pp": 3}, 6, wlb={"as_published": True})
    queues = row("wlb", {"dp": 2, "pp": 3}, 6, wlb={"release": "queues"}, candidates=1)
    assert published.step_time_s == queues.step_time_s
    assert published.step_time_s != row("wlb", {"dp": 2, "pp": 3}, 6).step_time_s
    assert (published.cuts, published.schedule) == ("whole", "1f1b")
    assert "as published" in published.note


def test_skrull_runs_algorithms_1_and_2_alone():
    published = row("skrull", {"dp": 2, "cp": 2}, skrull={"as_published": True})
    free = row("skrull", {"dp": 2, "cp": 2})
    assert free.mean_step_time_s <= published.mean_step_time_s
    # With room for everything, Algorithm 1 shares nothing, however much faster that were.
    assert (published.cuts, published.sharding) == ("whole", "")
    assert "Algorithms 1 and 2" in published.note


def test_a_row_says_what_it_ran():
    assert row("balanced", {"dp": 2, "cp": 2}, cp_sharding="per_document").sharding == "per_document"
    assert row("balanced", {"dp": 2, "pp": 3}, schedule="gpipe").schedule == "gpipe"
    symmetric = row("slimpack", {"pp": 3}, slimpack={"cuts": "symmetric"}, schedule="list")
    assert (symmetric.cuts, symmetric.schedule) == ("symmetric", "list")
