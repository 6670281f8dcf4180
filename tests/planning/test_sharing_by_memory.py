"""Documents that memory cannot hold one a stage of are shared, however many there are, and trials stay few."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from cost_samples import documents
from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.planning import candidates
from evenload.planning.dp_merge import nested_sizes
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import cluster_from
from evenload.types.document import ReplicaBlock
from evenload.types.layout import even_layout

TABLES = dict(np.load(Path(__file__).parent / "data" / "length_tables.npz"))
MODEL = model_from("llama-7b")
CONTEXT = 131_072


def planner_of(layout: dict[str, int], *, context: int = CONTEXT, limited: bool = True) -> StepPlanner:
    sizes = even_layout(MODEL.num_layers, **layout)
    cluster = cluster_from(f"h100x{sizes.world_size}")
    costs = analytic_coefficients(MODEL, cluster, sizes)
    memory = cluster.device.usable_bytes if limited else None
    return StepPlanner(
        MODEL, costs, sizes, memory, PlanOptions(max_pack_tokens=context, dp_merge=True), host="unlimited"
    )


def batch_of(table: str, count: int, context: int = CONTEXT) -> np.ndarray:
    """Drawn with repetition, cut to the context."""
    return np.minimum(np.random.default_rng(0).choice(TABLES[table].astype(np.int64), count), context)


def share_of_bound(planner: StepPlanner, lengths: np.ndarray, strategy: str) -> float:
    proposal = planner.propose(0, documents(lengths), strategy)
    validate_plan(proposal.plan, max_pack_tokens=planner.options.max_pack_tokens)
    assert proposal.feasible
    return planner.costs.lower_bound_seconds(lengths) / proposal.plan.predicted.step_time_s


@pytest.mark.parametrize("strategy", ["slimpack", "auto"])
def test_many_documents_as_long_as_the_context_fill_a_pipeline(strategy) -> None:
    """None is long beside a replica's work, so none was shared: 26 % of the bound, or refused."""
    assert share_of_bound(planner_of({"dp": 8, "pp": 4}), batch_of("books", 256), strategy) >= 0.88


@pytest.mark.parametrize(
    ("table", "count", "limited", "strategy", "most"),
    [
        ("books", 256, True, "slimpack", 3_000),
        ("books", 256, True, "auto", 3_500),
        ("docs", 512, True, "slimpack", 3_600),
        ("docs", 512, True, "auto", 6_600),
        ("docs", 512, False, "slimpack", 1_000),
    ],
)
def test_trials_do_not_explode(monkeypatch, table, count, limited, strategy, most) -> None:
    """Counted, because times depend on the machine; what cannot win is not searched."""
    rated, score_in_core = [0], candidates._score_in_core

    def counted(jobs) -> None:
        rated[0] += sum(len(trials) for _, trials in jobs)
        score_in_core(jobs)

    monkeypatch.setattr(candidates, "_score_in_core", counted)
    proposal: Proposal = planner_of({"dp": 8, "pp": 4}, limited=limited).propose(
        0, documents(batch_of(table, count)), strategy
    )
    assert proposal.feasible
    assert 50 <= rated[0] <= most


def test_blocks_divide_many_replicas_and_nest() -> None:
    assert even_layout(12, dp=12).block_sizes == (2, 3, 4, 6, 12)
    assert even_layout(12, dp=8).block_sizes == (2, 3, 4, 5, 6, 7, 8)
    assert nested_sizes(12) == [2, 4, 12]
    assert nested_sizes(8) == [2, 4, 8]
    assert nested_sizes(7) == [7]
    assert nested_sizes(15) == [3, 15]
    assert nested_sizes(1) == []
    assert even_layout(12).block_sizes == ()
    for dp in range(1, 65):
        sizes = [1, *nested_sizes(dp)]
        assert sizes[-1] == dp
        assert all(larger % size == 0 and dp % larger == 0 for size, larger in itertools.pairwise(sizes))
        assert ReplicaBlock(0, dp).replicas == range(dp)


@pytest.mark.parametrize("dp", [3, 6])
def test_replicas_that_are_no_power_of_two_share_documents(dp) -> None:
    planner = planner_of({"dp": dp, "tp": 8})
    proposal = planner.propose(0, documents([CONTEXT, *[2_000] * 60]), "slimpack")
    validate_plan(proposal.plan, max_pack_tokens=CONTEXT)
    ranks = {piece.cp for packs in proposal.plan.pack_plans for pack in packs.forward for piece in pack.slices}
    assert ranks == {1, dp}
