"""The start of a step: gathers of weights beside first forwards, by hand, by a plain clock, and in whole plans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import OverlapCost
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import pack_features, stage_units, unit_shares
from evenload.explore.timelines import detailed_timeline, split_proposal
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.schedule.step_ends import run_gathers
from evenload.types.columns import SliceColumns
from evenload.types.document import Document
from evenload.types.layout import even_layout

FREE = OverlapCost(compute_slowdown=0.0)
COSTLY = OverlapCost(communication_slowdown=2.5, compute_slowdown=0.9)
BATCH = tuple(Document(doc_id=at, num_tokens=8 + 5 * at, num_label_tokens=7) for at in range(8))


def gathers(updated, needed, alone, idle=(0, 0), beside=FREE):
    columns = (np.array(column, float) for column in (updated, needed, alone))
    start, end, waits, lost = run_gathers(*columns, idle, beside)
    return start.tolist(), end.tolist(), waits, lost


def test_a_gather_waits_for_its_update_and_for_the_gather_before_and_a_forward_for_its_own():
    """Updated at 1 and 2; the first forward reads them at 4 and 5, the second unit a second too early."""
    assert gathers([1, 2], [4, 5], [3, 2]) == ([1, 4], [4, 6], [(5, 6)], 1)


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
    assert [stage_units(costs, stage, "forward") for stage in range(3)] == [[0, 1], [2], [3]]
    before = unit_shares(costs, features, 0, "forward")[0].tolist()
    assert before[0] == 0 < before[1] < 1
    assert unit_shares(costs, features, 2, "forward")[0].tolist() == [0]


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
