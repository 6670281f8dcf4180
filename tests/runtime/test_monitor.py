"""What a run whose layout may change tells its planner and its user."""

import msgspec
import numpy as np
import pytest

from cost_samples import documents, sample_model
from evenload.cli.run_lines import switch_line
from evenload.data.batches import LoaderState
from evenload.data.blocks import TokenTable
from evenload.data.ledger import LedgerState
from evenload.feed.step_maker import PlannedStep
from evenload.planning.layouts.flex_planner import PlannerState
from evenload.runtime.stages.live_stages import Monitor, Switch
from evenload.types.layout import even_layout
from flex_cases import PUBLISHED, ROOM, SHORT, make
from predicted_timeline import predicted_timeline

SWITCH = Switch(
    before="pp=4", after="dp=4", stall_s=0.25, wait_s=0.5, weight_bytes=100, state_bytes=600,
    predicted_stall_s=0.1,
)  # fmt: skip

NO_TOKENS = TokenTable(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.int32))
AT_START = LoaderState(step=0, epoch=0, next_doc_id=0, parts=(), deferred=(), ledger=LedgerState(), fingerprint={})


def planned_step(flex, state=None):
    result = flex.propose(0, documents(SHORT), state=state)
    plan = result.proposal.plan
    return PlannedStep(
        epoch=0, plan=plan, tokens=NO_TOKENS, loader_state=AT_START, planner_state=PlannerState(),
        ledger_lines=(), plan_time_s=0.0, origin=str, part_of=int, decision=result.told,
    ), predicted_timeline(plan, sample_model(num_layers=4))  # fmt: skip


def test_a_switch_that_was_decided_is_told_with_what_it_took():
    flex = make(1, 4, ROOM, **PUBLISHED)
    planned, measured = planned_step(flex)
    monitor = Monitor(flex, flex.layout, 0, ())
    reported = monitor.note(planned, measured, SWITCH, None)
    assert (reported.before, reported.layout) == ("pp=4", "dp=4")
    assert (reported.measured_switch_s, reported.moved_bytes) == (0.75, 700)
    assert "the steps before" not in switch_line(0, SWITCH, reported)
    (known,) = monitor.known()
    predicted_s = flex.switch_seconds(flex.layout, planned.plan)
    (ratios,) = known.measured.switches
    assert (ratios.kind, ratios.ratios) == ("shrink", (pytest.approx(0.75 / predicted_s),))
    assert known.measured.memory_ratios == ()


def test_the_peak_of_a_step_with_a_switch_says_nothing_of_a_layout():
    """It holds what the switch left behind, which no step's prediction has."""
    flex = make(1, 4, ROOM, **PUBLISHED)
    planned, measured = planned_step(flex)
    monitor, peak_bytes = Monitor(flex, flex.layout, 0, ()), 2 * planned.plan.predicted.peak_memory_bytes
    monitor.note(planned, measured, SWITCH, 3 * peak_bytes)
    assert monitor.known()[-1].measured.memory_ratios == ()
    monitor.note(planned, measured, None, peak_bytes)
    assert monitor.known()[-1].measured.memory_ratios == (2.0,)


def test_a_switch_to_where_a_checkpoint_was_is_no_decision_of_the_step():
    """Processes start in four stages; the steps before the checkpoint ran in four replicas, where the run stays."""
    flex = make(1, 4, ROOM, **PUBLISHED)
    flat = msgspec.structs.replace(even_layout(4, dp=4), generation=1)
    state = msgspec.structs.replace(flex.initial_state(), layout=flat)
    planned, measured = planned_step(flex, state)
    reported = Monitor(flex, flex.layout, 0, ()).note(planned, measured, SWITCH, None)
    assert (reported.action, reported.measured_switch_s, reported.moved_bytes) == ("stay", None, None)
    text = switch_line(0, SWITCH, reported)
    assert text.endswith("; processes start in pp=4, the steps before the checkpoint ran in dp=4")
