"""The Monitor: what trained steps and switches say about layouts."""

import msgspec
import pytest

from evenload.planning.layouts.measured_layouts import (
    FADE,
    KEPT_RATIOS,
    WARM_UP_STEPS,
    LayoutMonitor,
    MeasuredAfter,
    MeasuredLayouts,
)
from evenload.types.layout import even_layout
from evenload.types.plan import Prediction, StepPlan

DEEP, WIDE, FLAT = even_layout(4, dp=1, pp=4), even_layout(4, dp=2, pp=2), even_layout(4, dp=4)


def plan_of(step: int, layout=WIDE, predicted_s: float = 2.0, peak_bytes: int = 0) -> StepPlan:
    return StepPlan(
        step=step,
        strategy="flexpipe",
        layout=layout,
        documents=(),
        num_label_tokens=0,
        pack_plans=(),
        schedules=(),
        times=(),
        predicted=Prediction(step_time_s=predicted_s, per_replica_s=(), peak_memory_bytes=peak_bytes),
        left_out=(),
    )


def test_a_layout_has_the_median_of_its_last_ratios() -> None:
    known = MeasuredLayouts()
    for step, ratio in enumerate([9.0, 1.0, 1.2, 5.0, 1.4, 1.3]):
        known = known.with_step(step, WIDE, ratio)
    # The first is forgotten, the disturbed one is not the median.
    assert known.factor(WIDE, 6) == pytest.approx(1.3)
    assert len(known.layouts[0].ratios) == KEPT_RATIOS
    # A switch changes the generation and not what is known.
    assert known.factor(msgspec.structs.replace(WIDE, generation=7), 6) == pytest.approx(1.3)


def test_layouts_that_never_ran_have_what_all_have_in_common() -> None:
    known = MeasuredLayouts().with_step(0, WIDE, 1.5)
    assert known.factor(FLAT, 1) == 1.5
    both = known.with_step(1, DEEP, 1.1)
    assert both.factor(FLAT, 2) == pytest.approx(1.3)


def test_what_is_held_against_a_layout_fades_while_it_does_not_run() -> None:
    known = MeasuredLayouts().with_step(0, WIDE, 2.0).with_step(1, DEEP, 1.0)
    assert known.factor(DEEP, 2) == 1.0
    assert known.factor(WIDE, 1) == 2.0
    assert known.factor(WIDE, 11) == pytest.approx(1.5 + 0.5 * FADE**10)
    assert known.factor(WIDE, 1000) == pytest.approx(1.5)


def test_switches_of_a_kind_have_the_median_of_measured_over_predicted() -> None:
    known = MeasuredLayouts().with_switch("grow", 2.0).with_switch("grow", 9.0).with_switch("grow", 2.5)
    assert known.switch_factor("grow") == 2.5
    assert (known.switch_factor("shrink"), known.switch_factor("move layers")) == (1.0, 1.0)
    both = known.with_switch("shrink", 1.2)
    assert (both.switch_factor("grow"), both.switch_factor("shrink")) == (2.5, 1.2)
    for _ in range(KEPT_RATIOS):
        both = both.with_switch("shrink", 0.5)
    assert [len(one.ratios) for one in both.switches] == [3, KEPT_RATIOS]
    assert both.switch_factor("shrink") == 0.5


def test_memory_has_the_median_and_only_takes_room() -> None:
    known = MeasuredLayouts()
    for ratio in (0.8, 1.1, 1.2):
        known = known.with_peak(ratio)
    assert known.memory_factor() == 1.1
    assert known.with_peak(0.7).with_peak(0.7).memory_factor() == 1.0
    track = LayoutMonitor(0)
    track.note(plan_of(0, peak_bytes=100), 1.0, peak_bytes=130)
    assert track.for_step(1).memory_factor() == 1.3


def test_a_step_is_planned_with_what_was_trained_before_it_could_be() -> None:
    """Always exactly that, however far the training thread has come."""
    for ahead in (0, 2):
        track = LayoutMonitor(ahead)
        states = []
        for step in range(10):
            before = [track.for_step(later) for later in range(step, step + ahead + 1)]
            track.note(plan_of(step), 2.0 + step)
            assert [track.for_step(later) for later in range(step, step + ahead + 1)] == before
            states.append(before[0])
        ratios = [state.layouts[0].ratios[-1] if state.layouts else None for state in states]
        silent = 1 + ahead + WARM_UP_STEPS
        assert ratios == [None] * silent + [(2.0 + step) / 2 for step in range(WARM_UP_STEPS, 10 - 1 - ahead)]


def test_the_first_steps_in_a_layout_say_nothing_and_switches_are_taken() -> None:
    track = LayoutMonitor(0)
    for step in range(3):
        track.note(plan_of(step), 3.0)
    other = msgspec.structs.replace(DEEP, generation=1)
    track.note(plan_of(3, other, 4.0), 40.0, ("grow", 1.5))
    assert track.for_step(4).factor(DEEP, 4) == 1.5  # what they have in common
    assert track.for_step(4).switch_factor("grow") == 1.5
    track.note(plan_of(4, other, 4.0), 4.0)
    assert track.for_step(5).factor(DEEP, 5) == 1.0


def test_a_resumed_run_knows_what_the_stopped_one_knew() -> None:
    for ahead in (0, 3):
        track = LayoutMonitor(ahead)
        for step in range(8):
            track.note(plan_of(step), 2.0 + step)
        data = msgspec.json.encode(track.known())
        again = LayoutMonitor(ahead, msgspec.json.decode(data, type=tuple[MeasuredAfter, ...]))
        assert len(track.known()) == ahead + 2
        for step in range(8, 9 + ahead):
            assert again.for_step(step) == track.for_step(step)
        again.note(plan_of(8), 7.0)  # the first step of a process says nothing
        track.note(plan_of(8), 7.0)
        assert again.for_step(9 + ahead) == track.for_step(8 + ahead)
