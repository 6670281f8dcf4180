"""Steps planned for ranks of different speeds: work moves, what is trained does not, close to the optimum."""

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import PassCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.plan.feedback.measured_factors import rank_work_s
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.plan.strategies.registry import STRATEGIES, require_trainable
from evenload.plan.strategies.strategy import Strategy
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.plan import decode_plan, encode_plan
from evenload.types.rank_speeds import RankSpeeds
from evenload.types.replica_block import ReplicaBlock
from speed_cases import optimum_s, true_makespan_s

BALANCING = ["balanced", "slimpack", "auto"]
LINK = LinkSpec(bandwidth_bytes_per_s=5e5, latency_s=1e-3)
FORWARD = PassCoefficients(linear_s_per_token=1.0, attention_s_per_pair=1e-3, slice_s=0.01, pack_s=0.5)
BACKWARD = PassCoefficients(linear_s_per_token=2.0, attention_s_per_pair=2.5e-3, slice_s=0.02, pack_s=0.7)
COSTS = sample_coefficients(
    forward=FORWARD,
    backward=BACKWARD,
    head_pack_s=0.0,
    p2p_bandwidth_bytes_per_s=1e5,
    intra_node=LINK,
    inter_node=LINK,
    host_link=LINK,
    devices_per_node=8,
)


def documents_of(lengths):
    return tuple(Document(doc_id=i, num_tokens=int(n), num_label_tokens=int(n) - 1) for i, n in enumerate(lengths))


def planner_of(dp, pp, *, merge=False, cap=None, costs=COSTS):
    options = PlanOptions(max_pack_tokens=4096, dp_merge=merge)
    return StepPlanner(sample_model(num_layers=4), costs, even_layout(4, dp=dp, pp=pp), cap, options, host="unlimited")


def slow_rank(dp, pp, factor=1.3, replica=1, rank=0):
    return RankSpeeds(
        slowness=tuple(tuple(factor if (d, p) == (replica, rank) else 1.0 for p in range(pp)) for d in range(dp))
    )


def lengths_of(count, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(5, 1, count).astype(int) + 1, 1, 3000).tolist()


@pytest.mark.parametrize("strategy", BALANCING)
@pytest.mark.parametrize(("dp", "pp"), [(2, 1), (2, 2), (4, 2)])
def test_a_replica_with_a_slow_rank_gets_less_work_of_the_same_step(dp, pp, strategy):
    """Replicas end together in truth; planned without speeds, all wait for the slow one."""
    planner, documents = planner_of(dp, pp), documents_of(lengths_of(24 * dp))
    true = slow_rank(dp, pp, rank=pp - 1)  # which has the head, so that the pipeline waits for it
    plain = planner.plan(0, documents, strategy)
    found = planner.propose(0, documents, strategy, speeds=true).require_feasible()
    validate_plan(found, max_pack_tokens=4096)
    assert (found.documents, found.num_label_tokens) == (plain.documents, plain.num_label_tokens)
    assert found.speeds == true
    assert plain.speeds is None
    shares = [rank_work_s(plan).sum(axis=1) / rank_work_s(plan).sum() for plan in (plain, found)]
    assert shares[1][1] < shares[0][1] - 0.02
    assert true_makespan_s(found, true) < true_makespan_s(plain, true)
    ends = found.predicted.per_replica_s
    # `balanced` moves no documents between replicas by simulated time.
    assert max(ends) <= (1.05 if strategy == "balanced" else 1.02) * sum(ends) / dp
    assert max(ends) == pytest.approx(true_makespan_s(found, true), rel=1e-9)


@pytest.mark.parametrize("strategy", BALANCING)
@pytest.mark.parametrize(("dp", "count"), [(2, 12), (3, 10)])
def test_it_lands_within_5_percent_of_the_heterogeneous_optimum(dp, count, strategy):
    """Brute force over all assignments of documents, of replicas without a pipeline."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        true = RankSpeeds(slowness=tuple((one,) for one in rng.uniform(1.0, 1.6, dp).tolist()), drift=1.1)
        lengths, planner = rng.integers(40, 700, count).tolist(), planner_of(dp, 1)
        plan = planner.propose(0, documents_of(lengths), strategy, speeds=true).require_feasible()
        assert true_makespan_s(plan, true) <= 1.05 * optimum_s(planner, lengths, true)


def test_no_plan_of_a_pipeline_is_far_from_the_best_split_of_the_work():
    """Two pipelines, one with a slow stage: every share of the documents by work, each planned on its own replica."""
    true, lengths = slow_rank(2, 2, 1.6), lengths_of(40, seed=5)
    planner = planner_of(2, 2)
    found = planner.propose(0, documents_of(lengths), "slimpack", speeds=true).require_feasible()
    order = np.argsort(-np.array(lengths), kind="stable")
    best = float("inf")
    for share in np.linspace(0.35, 0.5, 16):
        work, homes = np.zeros(2), [[], []]
        for index in order.tolist():
            ends = (work + planner.costs.document_seconds([lengths[index]])[0]) / [1 - share, share]
            home = int(ends.argmin())
            homes[home].append(lengths[index])
            work[home] += planner.costs.document_seconds([lengths[index]])[0]
        ends = [
            planner_of(1, 2)
            .propose(0, documents_of(mine), "slimpack", speeds=RankSpeeds(slowness=(true.slowness[replica],)))
            .plan.predicted.per_replica_s[0]
            for replica, mine in enumerate(homes)
        ]
        best = min(best, max(ends))
    assert true_makespan_s(found, true) <= 1.05 * best


def test_shared_packs_wait_for_the_slowest_member():
    """DP-Merge: members run the shared packs with the same seconds, so that they meet; the rest goes by pace."""
    true, planner = slow_rank(4, 1, 1.5), planner_of(4, 1, merge=True)
    lengths = [3000, *lengths_of(40, seed=2)]
    plan = planner.propose(0, documents_of(lengths), "slimpack", speeds=true).require_feasible()
    validate_plan(plan, max_pack_tokens=4096)
    shared = {
        (pack.slices, times.forward_s[pack.index])
        for packs, times in zip(plan.pack_plans, plan.times, strict=True)
        for pack in packs.forward
        if any(piece.cp > 1 for piece in pack.slices)
    }
    assert shared, "a document is shared"
    assert len({slices for slices, _ in shared}) == len(shared)
    ends = plan.predicted.per_replica_s
    assert max(ends) <= 1.03 * sum(ends) / 4


def test_costs_at_a_speed_are_scaled_but_for_transfers():
    packs = SliceColumns.from_ranges([[(0, 0, 600)], [(1, 0, 300)]])
    layout = even_layout(4, dp=2, pp=2)
    plain = PackCosts(sample_model(num_layers=4), COSTS, layout)
    slow = PackCosts(sample_model(num_layers=4), COSTS, layout, slowness=(1.5, 1.0))
    for direction in ("forward", "backward"):
        assert slow.pack_seconds(packs, direction) == pytest.approx(plain.pack_seconds(packs, direction) * [1.5, 1.0])
    assert slow.reduction_seconds() == plain.reduction_seconds()
    assert slow.lower_bound_seconds([600]) == plain.lower_bound_seconds([600])
    recompute = np.array([1, 1], np.int8)
    assert slow.pack_seconds(packs, "backward", recompute) == pytest.approx(
        plain.pack_seconds(packs, "backward", recompute) * [1.5, 1.0]
    )


def test_auto_is_no_slower_than_what_it_tries():
    true, documents = slow_rank(2, 2), documents_of(lengths_of(40, seed=7))
    planner = planner_of(2, 2)
    times = {name: true_makespan_s(planner.propose(0, documents, name, speeds=true).plan, true) for name in BALANCING}
    assert times["auto"] <= min(times.values()) * (1 + 1e-9)


def test_equal_work_where_more_work_does_not_fit_memory():
    """A cap that an equal division just fits: a step is never refused because of speeds."""
    documents = documents_of([400] * 8)
    plain = planner_of(2, 1).plan(0, documents, "balanced")
    cap = plain.predicted.peak_memory_bytes
    # One pack a replica, and each four documents: five in a pack exceed what four take.
    tight = planner_of(2, 1, cap=cap)
    fits = tight.propose(0, documents, "balanced", speeds=slow_rank(2, 1, 3.0))
    assert fits.feasible
    assert fits.plan.predicted.peak_memory_bytes <= cap
    with pytest.raises(InfeasiblePlanError):
        planner_of(2, 1, cap=1000).propose(0, documents, "balanced", speeds=slow_rank(2, 1)).require_feasible()


def test_plans_carry_their_speeds_across_processes_and_files():
    true = RankSpeeds(slowness=((1.0, 1.3), (1.0, 1.0)), drift=1.1)
    plan = planner_of(2, 2).propose(0, documents_of(lengths_of(12)), "balanced", speeds=true).plan
    assert decode_plan(encode_plan(plan)).speeds == true
    assert decode_plan_file(encode_plan_file([plan])) == (plan,)
    assert true.describe() == "1.10,1.43/1.10,1.10"
    assert true.block_factors(ReplicaBlock(0, 2)) == pytest.approx((1.1, 1.43))


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ({"slowness": ()}, "one row of equal length"),
        ({"slowness": ((1.0,), (1.0, 1.0))}, "one row of equal length"),
        ({"slowness": ((0.0,),)}, "a factor is 0.0"),
        ({"slowness": ((1.0,),), "drift": float("nan")}, "a factor is nan"),
    ],
)
def test_factors_that_are_none_are_refused(speeds, said):
    with pytest.raises(ConfigError, match=said):
        RankSpeeds(**speeds)


def test_what_cannot_follow_speeds_is_refused_with_the_reason():
    documents = documents_of(lengths_of(12))
    for strategy in STRATEGIES.values():
        if strategy.name in BALANCING or strategy.solver_limit_s or strategy.needs_one_stage or strategy.changes_layout:
            continue
        with pytest.raises(ConfigError, match="for ranks of different speeds"):
            planner_of(2, 1).propose(0, documents, strategy.name, speeds=slow_rank(2, 1))
        with pytest.raises(ConfigError, match=r"plan\.feedback is true, but strategy"):
            require_trainable(strategy.name, even_layout(4, dp=2), PlanOptions(), feedback=True)
    with pytest.raises(ConfigError, match="the speed of ranks would decide what a step trains"):
        require_trainable("wlb", even_layout(4, dp=2), PlanOptions(), feedback=True)
    with pytest.raises(ConfigError, match="strategy flexpipe does not give replicas work by the speed"):
        require_trainable("flexpipe", even_layout(4, dp=2), PlanOptions(), feedback=True)
    with pytest.raises(ConfigError, match="one replica and one pipeline rank"):
        require_trainable("slimpack", even_layout(4), PlanOptions(), feedback=True)
    for name in BALANCING:
        require_trainable(name, even_layout(4, dp=2), PlanOptions(), feedback=True)
    with pytest.raises(ConfigError, match="the layout is dp=2"):
        planner_of(2, 1).propose(0, documents, "balanced", speeds=slow_rank(3, 1))
    with pytest.raises(ConfigError, match="must not balance speeds"):
        Strategy(name="x", description="", plan=len, delay=len, balances_speeds=True)
