"""Collectives before, during and after a step's packs: by hand, by a plain clock, and in whole plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_plans import phased_plan
from cost_samples import documents, sample_coefficients, sample_model
from evenload.cost.coefficients import OverlapCost
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import stage_units, unit_shares
from evenload.explore.timelines import detailed_timeline, split_proposal
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.schedule.simulate import simulate
from evenload.schedule.step_collectives import (
    SimulatedReplica,
    _completing_places,
    num_before_sums,
    replicas_alike,
    run_collectives,
    run_reductions,
)
from evenload.stepplan.resimulation import replica_columns, timed_tasks
from evenload.stepplan.transfer_order import transfer_order
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import even_layout
from evenload.types.pipeline import ActionColumns, action_columns
from evenload.types.plan import block_of, completing_actions
from varied_plans import varied_plan

FREE = OverlapCost(compute_slowdown=0.0)
SCHEDULE_OF = {"1f1b": "static"}


def sums(released, alone, compute_end, overlap=FREE):
    result = run_reductions(np.array(released, float), np.array(alone, float), compute_end, overlap)
    return result.start_s.tolist(), result.end_s.tolist(), result.compute_end_s


def test_a_sum_waits_for_its_gradients_and_for_the_sum_before() -> None:
    assert sums([2, 3, 9], [4, 1, 2], 10.0) == ([2, 6, 9], [6, 7, 11], 10.0)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=5),
    st.integers(0, 4),
    st.sampled_from([(1.0, 0.0), (2.0, 0.5), (1.0, 0.5), (1.5, 0.25), (1.0, 1.0)]),
)
def test_reductions_are_those_of_a_plain_clock(units, more, rates) -> None:
    released = np.cumsum([gap for gap, _ in units]).tolist()
    alone, compute_end = [seconds for _, seconds in units], float(max(released, default=0) + more)
    beside = OverlapCost(communication_slowdown=rates[0], compute_slowdown=rates[1])
    result = sums(released, alone, compute_end, beside)
    idle = (compute_end, np.inf)
    *expected, _ = plain_clock(released, [np.inf] * len(alone), alone, idle, beside, until=compute_end)
    for mine, theirs in zip(result, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=0.1)


def plain_clock(ready, needed, alone, idle, overlap, until):
    """Compute and one transfer go on at their rates, tick by tick; return starts and ends of transfers, when compute
    comes to what is idle, and what it loses until `until`."""
    tick, now, computed, at, left, starts, ends, idle_from = 2**-8, 0.0, 0.0, 0, None, [], [], None
    while at < len(alone) or computed < until - 1e-9:
        if idle_from is None and computed >= idle[0] - 1e-9:
            idle_from = now
        while at < len(alone) and computed >= ready[at] - 1e-9:
            if left is None:
                starts.append(now)
                left = float(alone[at])
            if left > 1e-9:
                break
            ends.append(now)
            at, left = at + 1, None
        is_stalled = any(computed >= need - 1e-9 for need in needed[at:])
        is_idle = idle[0] - 1e-9 <= computed < idle[1] - 1e-9 and now < idle[1] - 1e-9
        if idle[0] - 1e-9 <= computed < idle[1] - 1e-9 and not is_idle:
            computed = idle[1]
            continue
        runs = left is not None
        if runs:
            left -= tick / (1 if is_stalled or is_idle else overlap.communication_slowdown)
        if is_idle:
            computed = max(computed, min(now, idle[1])) + tick if now + tick < idle[1] else idle[1]
        elif not is_stalled:
            computed += tick * (1 - overlap.compute_slowdown if runs else 1)
        now += tick
    return starts, ends, now if idle_from is None else idle_from, max(0.0, now - computed)


@pytest.mark.parametrize(
    ("row", "completing"),
    [
        ("0F0 0F1 0B0 0B1", {3: (0,)}),
        ("0F0 2F0 2B0 0B0", {2: (2,), 3: (0,)}),
        ("0F0 0I0 0W0 0F1 0I1 0W1", {5: (0,)}),
        ("0F0 2F0 2I0 0I0 2W0 0W0", {5: (0, 2)}),
        ("", {}),
    ],
)
def test_a_stage_is_complete_with_its_last_backward(row, completing) -> None:
    """Several stages of a rank whose backwards are split all at once: their order differs between replicas."""
    assert completing_actions((action[1], int(action[0])) for action in row.split()) == completing


@pytest.mark.parametrize(
    ("before_sums", "completing"), [(0, {2: (2,), 3: (0,)}), (3, {2: (2,), 3: (0,)}), (4, {3: (0, 2)})]
)
def test_what_is_complete_early_waits_for_the_last_shared_action(before_sums, completing) -> None:
    row = (("F", 0), ("F", 2), ("B", 2), ("B", 0))
    assert completing_actions(row, before_sums) == completing


def test_ranks_sum_nothing_that_ends_before_the_last_meeting() -> None:
    """Pack 0 is shared. Its last backward ends at 6 on rank 0; rank 1 has two actions after, one of which ends then,
    too. W's meet nobody."""
    rows = [([0, 1, 0, 1], [0] * 4, [0, 0, 1, 1]), ([0, 1, 0, 1], [1] * 4, [0, 0, 1, 1])]
    actions, end_s = ActionColumns.of_ranks(rows), np.array([1.0, 6.0, 7.0, 11.0, 2.0, 4.0, 6.0, 9.0])
    for sizes, alike, before in (([2, 1], 1, [2, 3]), ([4, 2], 2, [2, 3]), ([2, 2], 2, [0, 0]), ([1, 1], 1, [0, 0])):
        assert num_before_sums(actions, [np.array(sizes)] * 2, alike, end_s).tolist() == before
    split = ActionColumns.of_ranks([([0, 2, 3], [0] * 3, [0] * 3)])
    assert num_before_sums(split, [np.array([2])] * 2, 1, np.array([1, 2, 3])).tolist() == [2]


def test_replicas_that_end_with_the_same_packs_are_alike() -> None:
    """Replicas 0 and 1 end with a pack of both, of 2 and 3 one has own packs, 4 to 7 end with one of all four."""
    least = [2, 2, 2, 1, 4, 4, 4, 4]
    assert [replicas_alike(least, dp_rank) for dp_rank in range(8)] == [2, 2, 1, 1, 4, 4, 4, 4]


def test_units_are_complete_from_the_head_to_the_embedding() -> None:
    """A backward of 4 tokens: head 11 + 12, each layer 7 + 8 + 0.02 + pairs, the embedding 2."""
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3))
    features = costs.features.of_packs(SliceColumns.from_ranges([[(0, 0, 4)]]))
    layer = 15.02 + 0.25 * 10
    total = 23 + 3 * layer + 2
    left = [(3 * layer + 2) / total, (2 * layer + 2) / total, (layer + 2) / total, 2 / total, 0]
    assert stage_units(costs, 0) == [4, 3, 2, 1, 0]
    assert unit_shares(costs, features, 0, "backward")[0].tolist() == pytest.approx(left)


@pytest.mark.parametrize("schedule", ["1f1b", "list_split", "zb_h1"])
@pytest.mark.parametrize("virtual", [1, 2])
def test_the_simulator_and_the_executor_agree_on_what_completes_a_stage(schedule, virtual) -> None:
    if virtual > 1 and schedule != "list_split":
        schedule = "list"
    assert_same_places(
        varied_plan(3, num_layers=8, pp=2, virtual=virtual, schedule=SCHEDULE_OF.get(schedule, schedule))
    )


@pytest.mark.parametrize(("pp", "virtual", "split"), [(2, 1, False), (3, 1, True), (2, 2, False)])
def test_they_agree_where_replicas_share_packs(pp, virtual, split) -> None:
    """Some stages are complete early and wait, others are complete later than all that is shared."""
    sizes = {"dp": 4, "pp": pp, "virtual": virtual}
    plans = (phased_plan(seed, **sizes, split=split, own=1 - 0.5 * (seed % 2)) for seed in range(8, 16))
    assert {waits for plan in plans for waits in assert_same_places(plan)} == {True, False}


def assert_same_places(plan) -> list[bool]:
    """Return for every rank and stage whether its gradients wait for shared packs."""
    costs = PackCosts(sample_model(num_layers=plan.layout.num_layers), sample_coefficients(), plan.layout)
    waiting, least = (
        [],
        [
            min((block_of(plan, dp_rank, pack).size for pack in packs.backward), default=1)
            for dp_rank, packs in enumerate(plan.pack_plans)
        ],
    )
    for dp_rank in range(plan.layout.dp):
        actions = action_columns(plan.schedules[dp_rank])
        tasks, packs = timed_tasks(plan, dp_rank), replica_columns(plan, dp_rank)
        replica = SimulatedReplica(packs, tasks, actions, simulate(tasks, actions))
        place, is_whole = _completing_places(costs, replica, replicas_alike(least, dp_rank))
        expected, whole = np.full(place.shape, -1), np.zeros(place.shape, bool)
        for rank, row in enumerate(plan.schedules[dp_rank].ranks):
            before = transfer_order(plan, dp_rank, rank, "directed").num_before_sums
            for at, stages in completing_actions(((action.kind, action.stage) for action in row), before).items():
                for stage in stages:
                    expected[rank, stage] = actions.rank_offset[rank] + at
                    whole[rank, stage] = at >= before and row[at].kind == "B" and stages == (row[at].stage,)
                    waiting.append(at < before)
        assert place.tolist() == expected.tolist()
        assert is_whole.tolist() == whole.tolist()
    return waiting


def planner_of(sizes, **overlap):
    coefficients = sample_coefficients(reduce_bandwidth_bytes_per_s=1e2, **overlap)
    layout, options = even_layout(4, **sizes), PlanOptions(max_pack_tokens=64)
    return StepPlanner(sample_model(num_layers=4), coefficients, layout, None, options, host="unlimited")


BATCH = documents(8 + 5 * at for at in range(8))


@pytest.mark.parametrize("lengths", [[600, *[20] * 30], [600]], ids=["own documents last", "all shared"])
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "pp": 2}, {"dp": 4, "pp": 2, "virtual": 2}])
def test_a_step_that_shares_documents_hides_sums(sizes, lengths) -> None:
    """Behind the outlier, or within its last backward where all replicas end with it."""
    coefficients = sample_coefficients(
        reduce_bandwidth_bytes_per_s=1e2,
        overlap=FREE,
        overlap_gather=False,
        intra_node=LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=1e-4),
        devices_per_node=64,
    )
    layout, options = even_layout(4, **sizes), PlanOptions(max_pack_tokens=1024, dp_merge=True)
    planner = StepPlanner(sample_model(num_layers=4), coefficients, layout, None, options, host="unlimited")
    proposal = planner.propose(0, documents(lengths), "slimpack")
    predicted = proposal.plan.predicted
    shared = [[any(s.cp > 1 for s in pack.slices) for pack in packs.backward] for packs in proposal.plan.pack_plans]
    assert all(any(packs) and all(packs) == (len(lengths) == 1) for packs in shared)
    assert split_proposal(proposal).total_s() == pytest.approx(predicted.step_time_s)
    assert 0 < predicted.reduction_hidden_s <= predicted.reduction_s


def gathers(updated, needed, alone, idle=(0, 0), beside=FREE):
    columns = (np.array(column, float) for column in (updated, needed, alone))
    start, end, waits, lost = run_collectives(*columns, idle, beside)
    return start.tolist(), end.tolist(), waits, lost


def test_a_gather_waits_for_its_update_and_for_the_gather_before_and_a_forward_for_its_own():
    """Updated at 1 and 2; the first forward reads them at 4 and 5, the second unit a second too early."""
    assert gathers([1, 2], [4, 5], [3, 2]) == ([1, 4], [4, 6], [(5, 6)], 1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([(1.0, 0.0), (2.0, 0.25), (1.0, 0.5), (1.5, 0.5)]),
)
def test_gathers_are_those_of_a_plain_clock(units, idle_s, rates):
    """Update, idle, forwards."""
    beside = OverlapCost(communication_slowdown=rates[0], compute_slowdown=rates[1])
    updated = np.cumsum([update for update, _, _ in units]).astype(float)
    idle = (float(updated[-1]), float(updated[-1] + idle_s))
    needed = (idle[1] + np.cumsum([gap for _, gap, _ in units])).astype(float)
    alone = [float(seconds) for _, _, seconds in units]
    start, end, _, lost = run_collectives(updated, needed, np.array(alone), idle, beside)
    starts, ends, _, expected_lost = plain_clock(updated, needed, alone, idle, beside, until=needed[-1])
    assert start == pytest.approx(starts, abs=0.15)
    assert end == pytest.approx(ends, abs=0.15)
    assert lost == pytest.approx(expected_lost, abs=0.15)


def test_units_are_read_from_the_embedding_upwards():
    """A forward of 4 tokens: the embedding 2, each layer the same; the head belongs to the backward."""
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3, pp=3))
    features = costs.features.of_packs(SliceColumns.from_ranges([[(0, 0, 4)]]))
    assert [stage_units(costs, stage, "forward") for stage in range(3)] == [[0, 1], [2], [3]]
    before = unit_shares(costs, features, 0, "forward")[0].tolist()
    assert before[0] == 0 < before[1] < 1
    assert unit_shares(costs, features, 2, "forward")[0].tolist() == [0]


SLOW = OverlapCost(compute_slowdown=1.0)
COSTLY = OverlapCost(communication_slowdown=2.5, compute_slowdown=0.9)


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "virtual": 2}])
@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
@pytest.mark.parametrize(("kind", "other", "costly"), [("reduction", "gather", SLOW), ("gather", "reduction", COSTLY)])
def test_a_plan_says_what_it_hides(strategy, sizes, kind, other, costly) -> None:
    """Step time, causes, timeline and account agree; without transfers beside compute nothing is hidden, and where a
    gather costs more than it hides it comes after."""
    steps, seconds = {}, {}
    for name, beside in (("after", None), ("free", FREE), ("costly", costly)):
        planner = planner_of(sizes, overlap=beside, **{f"overlap_{other}": False})
        proposal = planner.propose(0, BATCH, strategy)
        predicted = steps[name] = proposal.plan.predicted
        seconds[name] = tuple(getattr(predicted, f"{kind}{part}_s") for part in ("", "_hidden"))
        assert split_proposal(proposal).total_s() == pytest.approx(predicted.step_time_s)
        timeline = detailed_timeline(proposal.plan, planner.costs)
        reported = getattr(timeline, f"{kind}_seconds")()
        assert reported[0] == pytest.approx(seconds[name][0])
        if beside is not SLOW:  # its packs end later than the simulation of packs alone says
            assert reported[1] == pytest.approx(seconds[name][1], abs=1e-9)
        assert float(timeline.side.end_s.max()) == pytest.approx(predicted.step_time_s)
    assert seconds["after"][1] == 0
    assert 0 < seconds["free"][1] <= seconds["free"][0]
    assert steps["free"].step_time_s < steps["after"].step_time_s
    if kind == "gather":
        assert steps["costly"] == steps["after"]
    else:
        assert seconds["free"][0] == pytest.approx(seconds["after"][0])
        assert steps["costly"].step_time_s == pytest.approx(steps["after"].step_time_s)
