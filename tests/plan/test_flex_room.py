"""What measured steps say to decisions of a layout, and layouts whose steps or switches have no room."""

import pytest

from cost_samples import documents, sample_model
from evenload.errors import InfeasiblePlanError
from evenload.plan.layouts.fmop import FlexState
from evenload.plan.layouts.measured_layouts import MeasuredLayouts
from evenload.plan.layouts.moves import SwitchPieces, model_pieces
from evenload.plan.layouts.switch_prices import switch_memory
from evenload.types.layout import even_layout
from evenload.types.run import LayoutDecision
from flex_cases import LONG, MIDDLE, PUBLISHED, ROOM, SHORT, make

SENT = SwitchPieces(pieces=model_pieces(sample_model(num_layers=4), 1), shared=frozenset(), ranks_per_machine=8)


def test_measured_steps_and_switches_correct_the_decision() -> None:
    """A layout that ran slower than predicted, or a slow switch, loses what plans alone would give it."""
    flex = make(2, 2, ROOM, **PUBLISHED)
    flat, here = even_layout(4, dp=4), flex.start.layout

    def decided(measured: MeasuredLayouts) -> LayoutDecision:
        return flex.propose(6, documents(SHORT), measured=measured).told

    plain = decided(MeasuredLayouts())
    assert (plain.action, plain.case, plain.other) == ("shrink", 4, "dp=4")
    alike = decided(MeasuredLayouts().with_step(5, here, 1.5))
    assert alike.action == "shrink"
    assert alike.keep_s == pytest.approx(1.5 * plain.keep_s)
    assert alike.new_s == pytest.approx(1.5 * plain.new_s)
    assert alike.switch_s == plain.switch_s
    slow = decided(MeasuredLayouts().with_step(4, flat, 1.5).with_step(5, here, 1.0))
    assert slow.action == "stay"
    assert slow.keep_s == pytest.approx(plain.keep_s)
    assert slow.new_s > 1.4 * plain.new_s
    assert decided(MeasuredLayouts().with_switch("shrink", 1e9)).action == "stay"
    assert decided(MeasuredLayouts().with_switch("grow", 1e9)) == plain


def test_a_layout_that_takes_more_memory_than_predicted_is_left_where_another_has_room() -> None:
    flex = make(4, 1, ROOM, **PUBLISHED)
    usual = flex.propose(0, documents(SHORT))
    assert usual.told.action == "stay"
    peak_bytes = usual.proposal.plan.predicted.peak_memory_bytes
    high = MeasuredLayouts().with_peak(1.01 * ROOM / peak_bytes)
    found = flex.propose(0, documents(SHORT), measured=high)
    assert (found.told.case, found.told.fits) == (3, False)
    assert found.proposal.plan.predicted.peak_memory_bytes < peak_bytes
    # Where none has room, training goes on with what fits by prediction.
    full = flex.propose(0, documents(SHORT), measured=MeasuredLayouts().with_peak(100.0))
    assert full.told.action == "stay"
    assert full.proposal.feasible
    assert full.told.why == "dp=4 holds the batch as predicted; by measured memory no layout does"
    assert make(4, 1, 30_000).propose(0, documents(LONG)).told.why == "no layout holds the batch"


def test_a_resumed_run_goes_to_the_layout_of_its_checkpoint_where_that_has_room() -> None:
    """Processes start in one replica of four stages, the checkpoint's steps ran in four of one. The step fits there to
    the byte; what the ranks leave behind lies beside it."""
    flat = even_layout(4, dp=4, generation=1)
    plan = make(4, 1, None).propose(0, documents(SHORT), state=FlexState(layout=flat)).proposal.plan
    takes = switch_memory(SENT, even_layout(4, pp=4), flat)
    needed = max(takes.switch_bytes, plan.predicted.peak_memory_bytes + takes.left_bytes)
    assert needed > plan.predicted.peak_memory_bytes
    make(1, 4, needed).require_room(even_layout(4, pp=4), plan)
    with pytest.raises(InfeasiblePlanError, match="processes start in pp=4 and step 0 is planned for dp=4") as told:
        make(1, 4, needed - 1).require_room(even_layout(4, pp=4), plan)
    assert "start in dp=4 ([parallel])" in str(told.value)
    # Where it runs already nothing changes.
    make(4, 1, plan.predicted.peak_memory_bytes).require_room(even_layout(4, dp=4), plan)


def test_the_first_step_behind_a_switch_makes_room_for_what_it_leaves() -> None:
    """In four replicas the step takes nearly all memory when it stores everything; beside the state that other ranks
    still read it has less, and saves memory. The steps behind it have all."""
    flex, cap_bytes = make(2, 2, 280_000, 1e9, **PUBLISHED), 280_000
    usual = make(4, 1, cap_bytes).propose(0, documents(MIDDLE)).proposal.plan.predicted
    found = flex.propose(0, documents(MIDDLE))
    plan = found.proposal.require_feasible()
    assert (found.told.action, plan.layout.describe()) == ("shrink", "dp=4")
    takes = switch_memory(SENT, even_layout(4, dp=2, pp=2), plan.layout)
    assert usual.peak_memory_bytes + takes.left_bytes > cap_bytes
    assert plan.predicted.peak_memory_bytes + takes.left_bytes <= cap_bytes
    assert plan.predicted.step_time_s - found.proposal.switch_s >= usual.step_time_s
    behind = flex.propose(1, documents(MIDDLE), state=found.state).proposal.plan
    assert behind.predicted == usual
