"""The start of a step: gathers of weights beside first forwards, by hand, by a plain clock, and in whole plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import OverlapCost
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import forward_units, pack_features, shares_before, unit_transfers
from evenload.explore.timelines import detailed_timeline, split_proposal
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.schedule.step_ends import delayed, first_gathers, run_gathers
from evenload.types.columns import SliceColumns
from evenload.types.document import Document
from evenload.types.layout import even_layout

FREE = OverlapCost(compute_slowdown=0.0)
STRETCHED = OverlapCost(communication_slowdown=2.0, compute_slowdown=0.0)
HALF = OverlapCost(communication_slowdown=2.0, compute_slowdown=0.5)
COSTLY = OverlapCost(communication_slowdown=2.5, compute_slowdown=0.9)
BATCH = tuple(Document(doc_id=at, num_tokens=8 + 5 * at, num_label_tokens=7) for at in range(8))


def gathers(updated, needed, alone, idle=(0, 0), beside=FREE):
    columns = (np.array(column, float) for column in (updated, needed, alone))
    start, end, waits, lost = run_gathers(*columns, idle, beside)
    return start.tolist(), end.tolist(), waits, lost


def test_a_gather_waits_for_its_update_and_for_the_gather_before_and_a_forward_for_its_own():
    """Updated at 1 and 2; the first forward reads them at 4 and 5, the second unit a second too early."""
    assert gathers([1, 2], [4, 5], [3, 2]) == ([1, 4], [4, 6], [(5, 6)], 1)


def test_compute_beside_a_gather_is_slower_and_later():
    """At half speed from 1 on: when the gather ends at 5, compute is at 3, where it needs it; it has lost 2."""
    assert gathers([1], [3], [4], beside=OverlapCost(compute_slowdown=0.5)) == ([1], [5], [], 2)


def test_a_gather_is_stretched_beside_compute_and_not_while_compute_waits_for_it():
    """Of 4 seconds alone 1 is done in the 2 before it is needed, 3 follow."""
    assert gathers([0], [2], [4], beside=STRETCHED) == (
        [0],
        [5],
        [(2, 5)],
        3,
    )


def test_a_rank_that_waits_for_its_first_pack_loses_nothing():
    """Nothing is computed from 1 to 9: the gather takes its time alone, and what the update lost is made up for."""
    found = gathers([1, 1], [9, 10], [2, 2], idle=(1, 9), beside=HALF)
    assert found == ([1, 3], [3, 5], [], 0)


def test_weights_that_nobody_reads_are_waited_for_by_nobody():
    assert gathers([1, 2], [np.inf, np.inf], [3, 2]) == ([1, 4], [4, 6], [], 0)
    assert gathers([], [], []) == ([], [], [], 0)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([(1.0, 0.0), (2.0, 0.25), (1.0, 0.5), (1.5, 0.5)]),
)
def test_times_are_those_of_a_plain_clock(units, idle_s, rates):
    """A loop over small ticks: update, idle, forwards; compute and one gather go on at their rates."""
    beside = OverlapCost(communication_slowdown=rates[0], compute_slowdown=rates[1])
    updated = np.cumsum([update for update, _, _ in units]).astype(float)
    idle = (float(updated[-1]), float(updated[-1] + idle_s))
    needed = (idle[1] + np.cumsum([gap for _, gap, _ in units])).astype(float)
    alone = [float(seconds) for _, _, seconds in units]
    start, end, _, lost = run_gathers(updated, needed, np.array(alone), idle, beside)
    tick, now, computed, at, left, starts, ends = 2**-8, 0.0, 0.0, 0, None, [], []
    while at < len(units) or computed < needed[-1] - 1e-9:
        while at < len(units) and computed >= updated[at] - 1e-9:
            if left is None:
                starts.append(now)
                left = alone[at]
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
            left -= tick / (1 if is_stalled or is_idle else beside.communication_slowdown)
        if is_idle:
            computed = max(computed, min(now, idle[1])) + tick if now + tick < idle[1] else idle[1]
        elif not is_stalled:
            computed += tick * (1 - beside.compute_slowdown if runs else 1)
        now += tick
    assert start == pytest.approx(starts, abs=0.15)
    assert end == pytest.approx(ends, abs=0.15)
    assert lost == pytest.approx(max(0.0, now - computed), abs=0.15)


def test_units_are_read_from_the_embedding_upwards():
    """A forward of 4 tokens: the embedding 2, each layer the same; the head belongs to the backward."""
    costs = PackCosts(sample_model(), sample_coefficients(), even_layout(3, pp=3))
    features = pack_features(costs, [(SliceColumns.from_ranges([[(0, 0, 4)]]), 0)])
    assert [forward_units(costs, stage) for stage in range(3)] == [[0, 1], [2], [3]]
    before = shares_before(costs, features, 0)[0].tolist()
    assert before[0] == 0 < before[1] < 1
    assert shares_before(costs, features, 2)[0].tolist() == [0]


def planner_of(beside, bandwidth_bytes_per_s=1e2, sizes=(("dp", 2),), **changes):
    coefficients = sample_coefficients(
        overlap=beside, overlap_reduction=False, reduce_bandwidth_bytes_per_s=bandwidth_bytes_per_s, **changes
    )
    layout = even_layout(4, **dict(sizes))
    return StepPlanner(
        sample_model(num_layers=4), coefficients, layout, None, PlanOptions(max_pack_tokens=64), host="unlimited"
    )


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "virtual": 2}])
@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
def test_a_plan_says_which_gathers_it_hides(strategy, sizes):
    """Step time, causes, timeline and account agree; where a gather costs more than it hides it comes after."""
    steps = {}
    for name, beside in (
        ("after", None),
        ("free", FREE),
        ("costly", COSTLY),
    ):
        planner = planner_of(beside, sizes=tuple(sizes.items()))
        proposal = planner.propose(0, BATCH, strategy)
        predicted = steps[name] = proposal.plan.predicted
        assert split_proposal(proposal).total_s() == pytest.approx(predicted.step_time_s)
        told = detailed_timeline(proposal.plan, planner.costs).gather_seconds()
        assert told == pytest.approx((predicted.gather_s, predicted.gather_hidden_s))
    assert steps["after"].gather_hidden_s == 0
    assert 0 < steps["free"].gather_hidden_s <= steps["free"].gather_s
    assert steps["free"].step_time_s < steps["after"].step_time_s
    assert steps["costly"] == steps["after"]


def test_behind_long_forwards_a_gather_disappears_but_for_the_embeddings():
    """A fast link and an update that takes no time: what is left is what the first forward begins with."""
    planner = planner_of(FREE, 1e6, reduce_latency_s=0.0, optimizer_s_per_parameter=0.0)
    predicted = planner.plan(0, BATCH, "slimpack").predicted
    found = unit_transfers(planner.costs.model, planner.costs.coefficients, planner.layout, 0)
    assert predicted.gather_s == pytest.approx(found.gather_s.sum())
    assert predicted.gather_s - predicted.gather_hidden_s == pytest.approx(found.gather_s[0])


def test_a_later_stage_has_the_time_that_the_first_loses():
    """Two stages: the second one's weights are gathered while the first waits for its own, and nothing is left."""
    planner = planner_of(FREE, 1e4, (("dp", 2), ("pp", 2)), reduce_latency_s=0.0, optimizer_s_per_parameter=0.0)
    replicas = [choice.candidate.simulated() for choice in planner.propose(0, BATCH, "balanced").choices]
    first, second = first_gathers(planner.costs, replicas)
    assert len(first.wait_end_s)
    assert (len(second.wait_end_s), second.lost_s) == (0, 0)
    late = [delayed(replica, (first, second)).simulation.makespan_s for replica in replicas]
    assert late == pytest.approx([replica.simulation.makespan_s + first.lost_s for replica in replicas])
