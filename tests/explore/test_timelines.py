"""What is shown of a plan: its timeline in detail, its step time by cause, and seconds of packs beside transfers."""

import numpy as np
import pytest

from cost_samples import documents, sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.cost.coefficients import OverlapCost
from evenload.explore.timelines import (
    detailed_timeline,
    overlapped_pack_times,
    split_proposal,
    split_step_of_plan,
    split_step_time,
)
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.strategies.registry import STRATEGIES
from evenload.types.cluster import LinkSpec
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.timeline import KINDS, SIDE_KINDS, Timeline
from predicted_timeline import predicted_timeline
from sweeps import spread

LINK = LinkSpec(bandwidth_bytes_per_s=2.0, latency_s=0.1)
HOST = LinkSpec(bandwidth_bytes_per_s=20.0, latency_s=0.1)
LENGTHS = [150, 90, 60, 30, 20, *([3] * 12)]
LAYOUTS = [
    even_layout(3, dp=2, pp=3),
    even_layout(4, dp=2, pp=2, virtual=2),
    even_layout(3, dp=2, cp=2, tp=2),
    even_layout(3, dp=4),
    even_layout(3, dp=9, pp=3),  # replicas without documents
    even_layout(3, dp=2, pp=3, tp=2),  # I and W take longer than the whole backward
]
CASES = [(one, name) for one in LAYOUTS for name in STRATEGIES if one.pp == 1 or not STRATEGIES[name].needs_one_stage]


def id_of(value) -> str:
    return value if isinstance(value, str) else value.describe()


def propose(layout: ParallelLayout, strategy: str, lengths=LENGTHS, *, host=HOST, **options) -> Proposal:
    coefficients = sample_coefficients(
        source="analytic", intra_node=LINK, inter_node=LINK, host_link=host, devices_per_node=64, attention_tile=4
    )
    model = sample_model(num_layers=layout.num_layers)
    settings = {"max_pack_tokens": 400, "dp_merge": True, "fixed_exact": {"solver_time_limit_s": 1.0}} | options
    planner = StepPlanner(model, coefficients, layout, None, plan_options(settings), host="unlimited")
    return planner.propose(0, documents(lengths), strategy)


def side_of(timeline: Timeline, kind: str) -> np.ndarray:
    assert timeline.side is not None
    return np.flatnonzero(timeline.side.kind == SIDE_KINDS.index(kind))


@pytest.mark.parametrize(("layout", "strategy"), CASES, ids=id_of)
@pytest.mark.parametrize("policy", ["replay", "recompute", "offload"])
def test_details_agree_with_what_the_planner_simulated(layout, strategy, policy) -> None:
    """Times, bytes and peak of every strategy, layout and policy are the planner's to the bit; kinds add up."""
    proposal = propose(layout, strategy, policy=policy)
    plan = proposal.plan
    detailed, plain = detailed_timeline(plan, proposal.costs), predicted_timeline(plan, proposal.costs.model)
    for name in ("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s", "memory_time_s", "memory_bytes"):
        assert np.array_equal(getattr(detailed, name), getattr(plain, name)), name
    assert detailed.step_time_s == plan.predicted.step_time_s
    assert detailed.peak_bytes() == plan.predicted.peak_memory_bytes
    kinds = detailed.memory_kind_bytes
    assert kinds is not None
    assert np.array_equal(kinds.sum(axis=1), detailed.memory_bytes)
    assert kinds.min() >= 0
    for dp_rank, choice in enumerate(proposal.choices):
        for rank, peak in enumerate(choice.candidate.simulation.peak_bytes.tolist()):
            own = (detailed.memory_dp_rank == dp_rank) & (detailed.memory_rank == rank)
            assert kinds[own].sum(axis=1).max() == peak
            assert np.array_equal(kinds[own][0], kinds[own][-1]), "everything is given back"


def test_copies_fit_into_their_actions_and_stick_out_by_what_the_plan_charges() -> None:
    """Slow host link: forward and backward last as long as their copies; a fast one costs nothing."""
    layout = even_layout(3, dp=2, pp=3)
    slow = propose(layout, "balanced", host=LinkSpec(bandwidth_bytes_per_s=10.0, latency_s=0.1), policy="offload")
    timeline = detailed_timeline(slow.plan, slow.costs)
    side = timeline.side
    assert side is not None
    for name, kind in (("offload", "F"), ("reload", "B")):
        rows = side_of(timeline, name)
        assert len(rows) == (timeline.kind == KINDS.index(kind)).sum(), "every pack is copied on every stage"
        for row in rows.tolist():
            at = task_of(timeline, row, kind)
            assert timeline.start_s[at] <= side.start_s[row] + 1e-9
            assert side.end_s[row] <= timeline.end_s[at] + 1e-9
    copied_s = sum(float((side.end_s - side.start_s)[side_of(timeline, name)].sum()) for name in ("offload", "reload"))
    hidden_s = copied_s - split_proposal(slow).offload_s * 6  # six pipeline ranks in all
    busy_s = float((timeline.end_s - timeline.start_s).sum())
    compute_s = busy_s - split_proposal(slow).offload_s * 6
    assert 0 < hidden_s <= compute_s + 1e-6
    assert copied_s > compute_s
    fast = propose(layout, "balanced", host=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0), policy="offload")
    assert split_proposal(fast).offload_s == 0


def task_of(timeline: Timeline, row: int, *kinds: str) -> int:
    side = timeline.side
    assert side is not None
    result = (timeline.dp_rank == side.dp_rank[row]) & (timeline.pack == side.pack[row])
    result &= (timeline.stage == side.stage[row]) & np.isin(timeline.kind, [KINDS.index(kind) for kind in kinds])
    (at,) = np.flatnonzero(result)
    return int(at)


def test_every_replica_reduces_together_and_updates_after_the_slowest() -> None:
    proposal = propose(even_layout(3, dp=9, pp=3), "best_fit")
    timeline = detailed_timeline(proposal.plan, proposal.costs)
    side = timeline.side
    assert side is not None
    slowest_s = max(proposal.plan.predicted.per_replica_s)
    reduction, optimizer, gather = (side_of(timeline, name) for name in ("reduction", "optimizer", "gather"))
    lanes = {(dp_rank, rank) for dp_rank in range(9) for rank in range(3)}
    for rows in (reduction, optimizer, gather):
        assert set(zip(side.dp_rank[rows].tolist(), side.rank[rows].tolist(), strict=True)) == lanes
        assert (side.pack[rows] == -1).all()
    for rank in range(3):
        own = reduction[side.rank[reduction] == rank]
        packs_end_s = timeline.end_s[timeline.rank == rank].max()
        assert side.start_s[own].min() == packs_end_s
        assert len(set(zip(side.start_s[own].tolist(), side.end_s[own].tolist(), strict=True))) == len(own) / 9
    assert (side.start_s[optimizer] == max(slowest_s, side.end_s[reduction].max())).all()
    assert (side.start_s[gather] == side.end_s[optimizer][0]).all()
    assert side.end_s[gather].tolist() == pytest.approx([proposal.plan.predicted.step_time_s] * 27)


def random_lengths(seed: int) -> list[int]:
    return np.ceil(np.random.default_rng(seed).lognormal(3.0, 1.2, 12)).clip(1, 400).astype(int).tolist()


@pytest.mark.parametrize(("layout", "strategy"), spread(CASES, 23), ids=id_of)
@pytest.mark.parametrize("policy", ["replay", "recompute", "offload"])
def test_causes_add_up_to_the_step_time(layout, strategy, policy) -> None:
    """Every strategy, layout and policy: the parts are the step time to 1e-9, none is negative."""
    for seed in range(2):
        lengths = random_lengths(seed)
        proposal = propose(layout, strategy, lengths, policy=policy)
        split = split_step_time(proposal.costs, proposal.choices)
        step_s = proposal.plan.predicted.step_time_s
        assert split.total_s() == pytest.approx(step_s, rel=1e-9)
        for cause, seconds in split.parts():
            assert seconds >= -1e-9 * step_s, cause
        again = split_step_of_plan(proposal.plan, proposal.costs)
        for field in again.__struct_fields__:
            assert getattr(again, field) == pytest.approx(getattr(split, field), abs=1e-9 * step_s), field
        assert split.useful_s == pytest.approx(proposal.costs.lower_bound_seconds(np.array(lengths)), rel=1e-9)


def test_each_cause_shows_where_it_is_made() -> None:
    """One plan for each: padding, recompute, offload, tp and cp transfers, cp and dp imbalance, hops, bubbles."""
    plain = even_layout(3, dp=2, pp=3)
    cases = {
        "padding_s": (plain, "padded", LENGTHS, {}),
        "recompute_s": (plain, "balanced", LENGTHS, {"policy": "recompute"}),
        "offload_s": (plain, "balanced", LENGTHS, {"policy": "offload"}),
        "tp_communication_s": (even_layout(3, tp=2), "balanced", LENGTHS, {}),
        "cp_communication_s": (even_layout(3, cp=2), "balanced", [150], {"cp_sharding": "per_document"}),
        "cp_imbalance_s": (even_layout(3, cp=2), "skrull", [40, 3, 3], {}),
        "dp_imbalance_s": (plain, "best_fit", LENGTHS, {}),
        "p2p_s": (plain, "balanced", LENGTHS, {}),
        "imbalance_s": (plain, "balanced", LENGTHS, {}),
        "stage_imbalance_s": (plain, "slimpack", [*([40] * 40)], {}),
        "dependency_s": (plain, "balanced", LENGTHS, {}),
        "warmup_s": (plain, "slimpack", LENGTHS, {}),
        "cooldown_s": (plain, "slimpack", LENGTHS, {}),
    }
    for cause, (layout, strategy, lengths, options) in cases.items():
        proposal = propose(layout, strategy, lengths, **options)
        assert getattr(split_step_time(proposal.costs, proposal.choices), cause) > 0, cause


def test_a_step_without_documents_is_reduction_and_optimizer() -> None:
    proposal = propose(even_layout(3, dp=2, pp=3), "balanced", [])
    split = split_step_time(proposal.costs, proposal.choices)
    assert split.total_s() == pytest.approx(split.reduction_s + split.optimizer_s)
    assert split.total_s() == pytest.approx(proposal.plan.predicted.step_time_s)


SECONDS = ("forward_s", "backward_s", "input_s", "weight_s")


def planned(strategy, beside, **sizes):
    """(plan, its costs) over a link as slow as a backward."""
    costs = sample_coefficients(reduce_bandwidth_bytes_per_s=1e2, **beside)
    options = plan_options({"max_pack_tokens": 64})
    planner = StepPlanner(sample_model(num_layers=4), costs, even_layout(4, **sizes), None, options, host="unlimited")
    return planner.plan(0, documents(8 + 5 * at for at in range(8)), strategy), planner.costs


def added_seconds(plan, costs):
    """{(replica, stage): {kind: seconds on top of the plan's own}} and which packs they are."""
    result = {}
    for replica, (before, after) in enumerate(zip(plan.times, overlapped_pack_times(plan, costs), strict=True)):
        assert (after.p2p_forward_s, after.p2p_backward_s) == (before.p2p_forward_s, before.p2p_backward_s)
        for kind in SECONDS:
            added = np.array(getattr(after, kind)) - np.array(getattr(before, kind))
            for pack, stage in np.argwhere(np.abs(added) > 1e-9).tolist() if added.size else ():
                result[replica, stage, kind, pack] = added[pack, stage]
    return result


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}, {"pp": 2}])
@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
def test_with_nothing_beside_them_packs_take_what_was_planned(strategy, sizes):
    assert added_seconds(*planned(strategy, {}, **sizes)) == {}


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}])
def test_the_last_backward_of_a_rank_has_what_sums_take(sizes):
    """Compute at seven tenths beside a sum: one backward of a rank is longer, where its replica is not done before."""
    plan, costs = planned("balanced", {"overlap": OverlapCost(compute_slowdown=0.3), "overlap_gather": False}, **sizes)
    added = added_seconds(plan, costs)
    assert {stage for _, stage, *_ in added} == set(range(plan.layout.num_stages))
    for (replica, stage, kind, pack), seconds in added.items():
        actions = [one for one in plan.schedules[replica].ranks[stage] if one.kind != "F"]
        assert (kind, pack) == ("backward_s", actions[-1].pack)
        assert 0 < seconds <= 0.3 / 0.7 * plan.times[replica].backward_s[pack][stage] + 1e-9


def test_the_first_forward_has_what_gathers_of_weights_take():
    plan, costs = planned("balanced", {"overlap": OverlapCost(compute_slowdown=0.3), "overlap_reduction": False}, dp=2)
    added = added_seconds(plan, costs)
    assert {(kind, pack) for _, _, kind, pack in added} == {
        ("forward_s", replica.ranks[0][0].pack) for replica in plan.schedules
    }
    assert min(added.values()) > 0
