"""Measured steps to speeds: hand-made clocks, noise, and the loop of planning and measuring."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cli.speed_line import speed_line
from evenload.plan.feedback.measured_factors import measured_factors, rank_work_s
from evenload.plan.feedback.speed_track import DEAD_BAND, WARM_UP_STEPS, SpeedTrack, speeds_of
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.rank_speeds import RankSpeeds
from speed_cases import clocked, optimum_s, true_makespan_s

LINK = LinkSpec(bandwidth_bytes_per_s=5e5, latency_s=1e-3)
COSTS = sample_coefficients(intra_node=LINK, inter_node=LINK, devices_per_node=8, head_pack_s=0.0)


def planner_of(dp, pp, merge=False):
    options = PlanOptions(max_pack_tokens=2048, dp_merge=merge)
    return StepPlanner(sample_model(num_layers=4), COSTS, even_layout(4, dp=dp, pp=pp), None, options, host="unlimited")


def planned(planner, step, strategy="slimpack", speeds=None, count=24, lengths=None):
    lengths = np.random.default_rng(step).integers(20, 400, count).tolist() if lengths is None else lengths
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    return planner.propose(step, documents, strategy, speeds=speeds).require_feasible()


def speeds(*rows, drift=1.0):
    return RankSpeeds(slowness=rows, drift=drift)


FACTORS = st.floats(0.5, 3.0)


@settings(max_examples=20, deadline=None)
@given(st.tuples(FACTORS, FACTORS), st.tuples(FACTORS, FACTORS), st.sampled_from(["balanced", "slimpack", "auto"]))
def test_factors_are_found_whatever_the_step_was_planned_with(first, second, strategy):
    """The plan's own factors are multiplied back in: a step that runs as planned confirms them."""
    planner, true = planner_of(2, 2), speeds(first, second)
    for used in (None, true, speeds((1.2, 1.0), (1.0, 0.8), drift=1.3)):
        plan = planned(planner, 0, strategy, used)
        assert measured_factors(plan, clocked(plan, true)) == pytest.approx(np.array([first, second]), rel=1e-9)


def test_an_action_that_something_held_up_does_not_count():
    planner, true = planner_of(2, 1), speeds((1.0,), (1.3,))
    plan = planned(planner, 0, "balanced")
    clock = clocked(plan, true)
    ends = clock.end_s.copy()
    ends[0] += 20 * (clock.end_s[0] - clock.start_s[0])
    held_up = replace(clock, end_s=ends)
    assert measured_factors(plan, held_up) == pytest.approx(np.array([[1.0], [1.3]]), rel=1e-9)


def test_factors_by_hand():
    """Two actions of a rank, predicted 3 s and 5 s, measured 3.3 s and 6 s: 9.3 / 8."""
    plan = planned(planner_of(2, 1), 0, "balanced", lengths=[50, 50])
    predicted_s = [times.forward_s[0][0] for times in plan.times], [times.backward_s[0][0] for times in plan.times]
    clock = clocked(plan, speeds((1.1,), (1.0,)))
    assert clock.num_tasks == 4
    seconds = clock.end_s - clock.start_s
    seconds[clock.dp_rank == 0] = [1.1 * predicted_s[0][0], 1.2 * predicted_s[1][0]]
    found = measured_factors(plan, replace(clock, end_s=clock.start_s + seconds))
    expected = (1.1 * predicted_s[0][0] + 1.2 * predicted_s[1][0]) / (predicted_s[0][0] + predicted_s[1][0])
    assert found == pytest.approx(np.array([[expected], [1.0]]))


def test_a_replica_without_packs_and_shared_packs_say_nothing():
    plan = planned(planner_of(2, 1), 0, "balanced", lengths=[50])
    factors = measured_factors(plan, clocked(plan, speeds((1.3,), (1.3,))))
    assert np.isnan(factors).sum() == 1
    assert factors[~np.isnan(factors)] == pytest.approx([1.3])
    merged = planned(planner_of(2, 1, merge=True), 0, "slimpack", lengths=[1500])
    assert merged.pack_plans[0].forward[0].slices == merged.pack_plans[1].forward[0].slices, "the document is shared"
    assert np.isnan(measured_factors(merged, clocked(merged, speeds((1.0,), (1.3,))))).all()


def test_work_is_counted_at_equal_speed():
    planner = planner_of(4, 1, merge=True)
    lengths = [1500, *np.random.default_rng(0).integers(20, 300, 30).tolist()]
    for used in (None, speeds((1.0,), (1.4,), (1.0,), (1.2,), drift=1.1)):
        plan = planned(planner, 0, "slimpack", used, lengths=lengths)
        factors = [1.0] * 4 if used is None else [used.factors(dp_rank)[0] for dp_rank in range(4)]
        shared = any(piece.cp > 1 for pack in plan.pack_plans[0].forward for piece in pack.slices)
        by_ends = np.array(plan.predicted.per_replica_s) / factors
        work = rank_work_s(plan).sum(axis=1)
        # A fast member's shared packs take as long as the slowest member's.
        assert shared
        assert (work <= by_ends * (1 + 1e-9)).all()
        assert work[1] == pytest.approx(by_ends[1])


def test_the_dead_band_keeps_noise_from_changing_plans():
    """Every action off by 5 %, the sums of a rank by about 1 %: nothing ever changes."""
    planner, track, noise = planner_of(2, 2), SpeedTrack(even_layout(4, dp=2, pp=2), 0), np.random.default_rng(4)
    for step in range(30):
        plan = planned(planner, step, "balanced", track.for_step(step))
        assert not track.note(plan, clocked(plan, speeds((1.0, 1.0), (1.0, 1.0)), noise, 0.05))
        assert plan.speeds is None


def test_a_single_odd_step_changes_nothing():
    planner, track = planner_of(2, 1), SpeedTrack(even_layout(4, dp=2), 0)
    even = speeds((1.0,), (1.0,))
    for step in range(8):
        plan = planned(planner, step, "balanced", track.for_step(step))
        assert not track.note(plan, clocked(plan, speeds((3.0,), (1.0,)) if step == 4 else even))


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_slow_rank_is_followed_after_a_fixed_number_of_steps(ahead):
    """Slow from step 4 on: seen in two steps (the median of three), in force `ahead` steps later, 3 % after four; then
    equal again. `for_step` is asked as early as plans are made: right after the step that allows it was trained."""
    planner, layout = planner_of(2, 2), even_layout(4, dp=2, pp=2)
    track = SpeedTrack(layout, ahead)
    slow, even = speeds((1.0, 1.0), (1.0, 1.3)), speeds((1.0, 1.0), (1.0, 1.0))
    steps = range(10, 40)  # as after a resume
    waiting = {step: track.for_step(step) for step in steps[: ahead + 1]}
    used, changes = [], []
    for step in steps:
        used.append(waiting.pop(step))
        plan = planned(planner, step, "balanced", used[-1])
        true = slow if 14 <= step < 28 else even
        if track.note(plan, clocked(plan, true)):
            changes.append(step)
        waiting[step + 1 + ahead] = track.for_step(step + 1 + ahead)
    assert changes[0] == 15
    first = next(at for at, one in zip(steps, used, strict=True) if one is not None)
    assert first == 15 + 1 + ahead
    known = used[steps.index(18 + ahead)]
    assert known.factors(1)[1] == pytest.approx(1.3, rel=DEAD_BAND)
    assert known.factors(0) == (1.0, 1.0)
    assert used[-1].slowness == ((1.0, 1.0), (1.0, 1.0))
    assert used[-1].drift == pytest.approx(1.0, rel=DEAD_BAND)


def test_the_first_steps_say_nothing():
    """They pay for what is done once."""
    track, planner = SpeedTrack(even_layout(4, dp=2), 0), planner_of(2, 1)
    for step in range(WARM_UP_STEPS):
        plan = planned(planner, step, "balanced")
        assert not track.note(plan, clocked(plan, speeds((5.0,), (5.0,))))
    assert track.speeds is None


def test_drift_and_slowness_are_told_apart():
    found = speeds_of(np.array([[1.2, 1.21], [1.2, 1.8], [np.nan, 1.19]]))
    assert found.drift == 1.2
    assert found.slowness == ((1.0, 1.0), (1.0, pytest.approx(1.5)), (1.0, 1.0))
    assert speeds_of(np.full((2, 1), np.nan)) == speeds((1.0,), (1.0,))


@pytest.mark.parametrize("strategy", ["balanced", "slimpack", "auto"])
def test_the_loop_lands_within_5_percent_of_the_heterogeneous_optimum(strategy):
    """DP2 with a replica 30 % slower, noise of 3 % an action: planned from what was measured, judged by the truth."""
    planner, true, noise = planner_of(2, 1), speeds((1.0,), (1.3,)), np.random.default_rng(8)
    track, ratios = SpeedTrack(planner.layout, 2), []
    waiting = {step: track.for_step(step) for step in range(3)}
    for step in range(14):
        lengths = np.random.default_rng(step).integers(60, 900, 12).tolist()
        plan = planned(planner, step, strategy, waiting.pop(step), lengths=lengths)
        assert [document.num_tokens for document in plan.documents] == lengths
        track.note(plan, clocked(plan, true, noise, 0.03))
        waiting[step + 3] = track.for_step(step + 3)
        ratios.append(true_makespan_s(plan, true) / optimum_s(planner, lengths, true))
    assert max(ratios[8:]) <= 1.05, ratios
    assert min(ratios[:3]) > 1.05, "without feedback the slow replica is waited for"


def test_what_a_run_says():
    plan = planned(planner_of(2, 2), 3, "balanced")
    said = speed_line(plan, speeds((1.0, 1.0), (1.0, 1.31), drift=1.02), 14)
    assert said == (
        "feedback: packs take 1.34 times their predicted seconds on rank 3, 1.02 times on the others: replica 1 gets "
        "about 24% less work from step 14 on"
    )
    assert speed_line(plan, speeds((1.0, 1.0), (1.0, 1.0), drift=1.2), 5) == (
        "feedback: packs take 1.20 times their predicted seconds on all ranks: replicas get equal work from step 5 on"
    )
    shared = planned(planner_of(1, 2), 0, "balanced")
    assert speed_line(shared, speeds((1.4, 1.0)), 5).endswith("packs and their order follow from step 5 on")
    many = planned(planner_of(8, 1), 0, "balanced")
    assert "and 2 more" in speed_line(many, speeds(*((1.0 + 0.1 * one,) for one in [0, 0, 1, 2, 3, 4, 5, 6])), 5)
