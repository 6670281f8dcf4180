"""What measured steps say to decisions of a layout, and layouts whose steps or switches have no room."""

import msgspec
import numpy as np
import pytest

from cost_samples import documents, reduction_seconds, sample_model
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.explore.batches import SampledBatch
from evenload.explore.evaluate import StrategyPlanners, evaluate_strategies
from evenload.explore.timelines import split_proposal
from evenload.planning.layouts.flex_planner import FlexPlanner, FlexState
from evenload.planning.layouts.measured_layouts import MeasuredLayouts
from evenload.planning.layouts.moves import SwitchPieces, SwitchPrices, model_pieces, switch_memory
from evenload.planning.planner import StepPlanner
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.planning.strategies.registry import STRATEGIES, require_layouts
from evenload.report.table import format_action, format_conditions
from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout, split_layout
from evenload.types.run import LayoutDecision
from flex_cases import LONG, MIDDLE, NARROW, PUBLISHED, ROOM, SHORT, TIGHT, make
from predicted_timeline import predicted_timeline


def run(flex: FlexPlanner, batches: list[list[int]]) -> list:
    """All steps, the state handed on as bytes."""
    result, state = [], flex.initial_state()
    for step, lengths in enumerate(batches):
        coming = [documents(later) for later in batches[step + 1 :]]
        result.append(flex.propose(step, documents(lengths), state=state, coming=coming))
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(result[-1].state), type=FlexState)
    return result


def sizes(proposal) -> tuple[int, int]:
    return proposal.proposal.plan.layout.dp, proposal.proposal.plan.layout.pp


def test_shrinks_where_a_shallower_pipeline_pays_for_the_switch() -> None:
    flex = make(2, 2, ROOM, **PUBLISHED)
    result = flex.propose(0, documents(SHORT))
    assert result.decision.action == "switch"
    assert result.decision.fits
    assert sizes(result) == (4, 1)
    plan = result.proposal.plan
    assert plan.layout.generation == 1
    assert result.state == FlexState(layout=plan.layout, switched_at=0)
    alone = make(4, 1, ROOM).start.propose(0, documents(SHORT), "flexpipe").plan.predicted.step_time_s
    links, hidden_s = flex.start.costs.coefficients, max(plan.predicted.per_replica_s)
    prices = SwitchPrices(flex.start.costs.model, flex.start.layout, links)
    moved_s = prices.seconds(links, flex.start.layout, plan.layout, hidden_s)
    assert 0 < moved_s < prices.seconds(links, flex.start.layout, plan.layout, 0.0)
    assert plan.predicted.step_time_s == pytest.approx(alone + moved_s)
    assert split_proposal(result.proposal).total_s() == pytest.approx(plan.predicted.step_time_s)


def test_saves_memory_where_switching_is_dearer() -> None:
    """Not A, C and D: the long batch needs a memory plan at dp=4, and the links are slow."""
    flex = make(4, 1, TIGHT, 0.05, **PUBLISHED)
    result = flex.propose(0, documents(LONG))
    assert (result.told.action, format_conditions(result.told)) == ("save memory", "· · C D")
    assert sizes(result) == (4, 1)
    assert result.proposal.feasible
    assert any(packs.policies for packs in result.proposal.plan.pack_plans)


def test_grows_where_that_beats_the_memory_plan() -> None:
    """Not A, C, not D."""
    result = make(4, 1, TIGHT, **PUBLISHED).propose(0, documents(LONG))
    assert (result.told.action, format_conditions(result.told)) == ("grow", "· · C ·")
    assert sizes(result)[1] > 1
    assert not any(packs.policies for packs in result.proposal.plan.pack_plans)


def test_grows_where_no_memory_plan_fits() -> None:
    """Not A, not C: the printed conditions have no answer where D holds by a rounding of infinities."""
    result = make(4, 1, NARROW, 10.0, **PUBLISHED).propose(0, documents(LONG))
    assert result.decision.action == "switch"
    assert not result.decision.fits_saving
    assert result.proposal.feasible
    # The even split does not fit at this depth; HBSA moves a layer.
    assert sizes(result) == (2, 2)
    assert not make(2, 2, NARROW).start.propose(0, documents(LONG), "flexpipe").feasible


def test_phases_of_other_lengths_are_met_at_their_first_step_and_not_before() -> None:
    """Where the sum over replicas is slow, few tokens want a pipeline and many want replicas: every switch comes with
    its phase, although the phase is in view earlier and a switch has to have paid twice."""
    usual = make(1, 4, None)
    reduction_s = reduction_seconds(make(4, 1, None).start.costs)
    links = usual.start.costs.coefficients
    slow = msgspec.structs.replace(
        links,
        reduce_bandwidth_bytes_per_s=links.reduce_bandwidth_bytes_per_s * reduction_s / 600,
        intra_node=msgspec.structs.replace(links.intra_node, bandwidth_bytes_per_s=1e9),
    )
    start = StepPlanner(usual.start.costs.model, slow, usual.layout, None, usual.start.options, host="unlimited")
    flex = FlexPlanner(start, lambda _: slow, FlexOptions(known_steps=5), layouts=[usual.layout, even_layout(4, dp=4)])
    few, many = [4] * 4, SHORT
    batches = [few] * 7 + [many] * 7 + [few] * 7
    result = run(flex, batches)
    assert [one.told.layout for one in result] == ["pp=4"] * 7 + ["dp=4"] * 7 + ["pp=4"] * 7
    assert [one.told.later_steps for one in result[:8]] == [0, 0, 0, 4, 3, 2, 1, 0]
    assert [one.told.later_steps for one in result[10:15]] == [4, 3, 2, 1, 0]
    assert result[4].told.why.endswith("gaining most from step 7 on")
    assert format_action(result[4].told) == "① stay, waits"
    # No other sequence of layouts takes less: best seconds up to every step, in either layout.
    alone = {
        layout: [flex.planner_of(layout).propose(0, documents(one), "flexpipe").plan for one in batches]
        for layout in flex.candidates.given
    }
    best = {flex.layout: 0.0, even_layout(4, dp=4): float("inf")}
    for step in range(len(batches)):
        best = {
            here: min(
                seconds + (flex.switch_seconds(there, alone[here][step]) if there != here else 0.0)
                for there, seconds in best.items()
            )
            + alone[here][step].predicted.step_time_s
            for here in best
        }
    taken_s = sum(one.proposal.plan.predicted.step_time_s for one in result)
    assert taken_s == pytest.approx(min(best.values()))


def test_nothing_fits_is_infeasible_with_stage_and_bytes() -> None:
    flex = make(4, 1, 30_000)
    result = flex.propose(0, documents(LONG))
    assert not result.proposal.feasible
    message = r"no layout of 4 devices holds the batch .* [1-9].* KiB on pipeline rank \d"
    with pytest.raises(InfeasiblePlanError, match=message):
        result.proposal.require_feasible()


def test_plans_are_valid_deterministic_and_can_be_written() -> None:
    batches = [SHORT, LONG, MIDDLE, SHORT, SHORT, [7], LONG]
    result, again = (run(make(2, 2, NARROW), batches) for _ in range(2))
    plans = [one.proposal.plan for one in result]
    assert [plan.digest for plan in plans] == [one.proposal.plan.digest for one in again]
    assert len({plan.layout.generation for plan in plans}) > 2
    for plan, lengths in zip(plans, batches, strict=True):
        validate_plan(plan, max_pack_tokens=1000)
        assert plan.strategy == "flexpipe"
        assert [document.num_tokens for document in plan.documents] == lengths
        assert plan.layout.world_size <= 4
        timeline = predicted_timeline(plan, sample_model(num_layers=4))
        assert timeline.step_time_s == plan.predicted.step_time_s
        assert timeline.end_s.max() == pytest.approx(max(plan.predicted.per_replica_s))
    assert decode_plan_file(encode_plan_file(plans)) == tuple(plans)


def test_row_counts_switches_and_their_seconds() -> None:
    flex = make(4, 1, NARROW, overhead_s=0.5)
    batches = [SampledBatch(documents(lengths), (), 0) for lengths in (LONG, LONG, SHORT)]
    result = evaluate_strategies(StrategyPlanners(planner=flex.start, flexible=flex), batches, ["balanced", "flexpipe"])
    balanced, flexpipe = result.results
    steps = result.proposals["flexpipe"]
    assert not balanced.feasible
    assert flexpipe.feasible
    assert result.best == "flexpipe"
    assert flexpipe.layout == {"dp": 2, "cp": 1, "pp": 2, "tp": 1}
    assert flexpipe.note.startswith("layout switched 1 time, ")
    assert "dp=2 pp=2 layers=3+1 (3)" in flexpipe.note
    assert flexpipe.step_time_s == tuple(step.plan.predicted.step_time_s for step in steps)
    assert flexpipe.time_split is not None
    assert flexpipe.time_split.switch_s == pytest.approx(np.mean([step.switch_s for step in steps]))
    assert steps[0].switch_s > 0
    with pytest.raises(ConfigError, match="give evaluate_strategies a FlexPlanner"):
        evaluate_strategies(StrategyPlanners(planner=flex.start), batches, ["flexpipe"])


def test_strategies_and_layouts_that_do_not_go_together_are_refused() -> None:
    here = even_layout(4, dp=2, pp=2)
    for name, one in STRATEGIES.items():
        if not one.changes_layout:
            require_layouts(name, here, 1)
    for name in ("flexpipe", "auto"):
        require_layouts(name, here, 3)
    with pytest.raises(ConfigError, match=r'there is dp=2 pp=2 alone.*plan\.layouts = \["pp=1", "pp=4"\]'):
        require_layouts("flexpipe", here, 1)
    with pytest.raises(ConfigError, match=r"strategy 'balanced' stays in its layout.*flexpipe or auto"):
        require_layouts("balanced", here, 2)
    with pytest.raises(ConfigError, match="did you mean 'flexpipe'"):
        require_layouts("flexpip", here, 2)


def test_given_layouts_are_the_only_ones_and_many_are_ordered_by_estimate() -> None:
    """Of ten layouts only `finalists` are planned: the cheap ones, the fastest among them."""
    flex = make(2, 2, ROOM, **PUBLISHED)
    given = [even_layout(4, dp=4), even_layout(4, dp=2, pp=2), even_layout(4, pp=4), even_layout(4, dp=1, pp=3)]
    given += [split_layout(counts, dp=1, pp=2) for counts in ((1, 3), (3, 1), (2, 2))]
    links = flex.candidates.coefficients_of
    result = FlexPlanner(flex.start, links, FlexOptions(finalists=1, **PUBLISHED), layouts=given)
    step = result.propose(0, documents(SHORT))
    assert sizes(step) == (4, 1)
    assert result.candidates.search(np.array(SHORT), result.layout).num_priced == len(given)
    only_deep = FlexPlanner(flex.start, links, FlexOptions(**PUBLISHED), layouts=given[1:])
    assert only_deep.propose(0, documents(SHORT)).told.layout == "dp=2 pp=2"
    alone = FlexPlanner(flex.start, links, FlexOptions(**PUBLISHED), layouts=[flex.start.layout])
    reported = alone.propose(0, documents(SHORT)).told
    assert (reported.other, reported.why) == ("", "dp=2 pp=2 holds the batch; no other layout does")


def test_layouts_that_a_run_cannot_change_to_are_refused() -> None:
    flex = make(2, 2, ROOM)
    links = flex.candidates.coefficients_of
    with pytest.raises(ConfigError, match=r"cp=2 tp=1, the run starts with cp=1 tp=1"):
        FlexPlanner(flex.start, links, layouts=[even_layout(4, cp=2)])
    with pytest.raises(ConfigError, match=r"has 8 devices and 4 layers, the run 4 and 4"):
        FlexPlanner(flex.start, links, layouts=[even_layout(4, dp=8)])
    with pytest.raises(ConfigError, match="skrull"):
        FlexPlanner(flex.start, links, strategy="skrull", layouts=[even_layout(4, dp=2, pp=2)])


def test_auto_plans_inside_layouts_that_change() -> None:
    flex = make(2, 2, ROOM, **PUBLISHED)
    assert not flex.changes_layout_of("auto")
    given = FlexPlanner(flex.start, flex.candidates.coefficients_of, flex.options, layouts=[even_layout(4, dp=4)])
    assert given.changes_layout_of("auto")
    assert not given.changes_layout_of("balanced")
    result = given.with_strategy("auto").propose(0, documents(SHORT))
    assert result.decision.action == "switch"
    plan = result.proposal.plan
    assert (plan.strategy, plan.layout.describe(), plan.layout.generation) == ("auto", "dp=4", 1)
    validate_plan(plan, max_pack_tokens=1000)
    alone = make(4, 1, ROOM).start.propose(0, documents(SHORT), "auto").plan.predicted.step_time_s
    assert plan.predicted.step_time_s == pytest.approx(alone + result.proposal.switch_s)
    batches = [SampledBatch(documents(SHORT), (), 0)] * 2
    planners = StrategyPlanners(planner=flex.start, flexible=given)
    auto, _ = evaluate_strategies(planners, batches, ["auto", "flexpipe"]).results
    assert [one.action for one in auto.layout_decisions] == ["shrink", "stay"]


def test_what_was_planned_ahead_changes_nothing() -> None:
    """Plans of known steps are kept: a planner that knows what comes plans each step as one that starts there."""
    batches = [SHORT, LONG, MIDDLE, SHORT, SHORT, LONG]
    whole, state = make(2, 2, NARROW, known_steps=3), None
    for step, lengths in enumerate(batches):
        coming = [documents(later, 100 * (step + 1 + at)) for at, later in enumerate(batches[step + 1 :])]
        fresh = make(2, 2, NARROW, known_steps=3)
        result, fresh = (
            one.propose(step, documents(lengths, 100 * step), state=state, coming=coming) for one in (whole, fresh)
        )
        assert result.proposal.plan == fresh.proposal.plan
        assert (result.told, result.state) == (fresh.told, fresh.state)
        state = result.state


def test_decisions_are_told_with_conditions_seconds_and_reason() -> None:
    reported = [one.told for one in run(make(4, 1, NARROW), [SHORT, LONG, LONG, SHORT, SHORT])]
    assert [(one.case, one.action, one.layout) for one in reported] == [
        (1, "stay", "dp=4"),
        (3, "grow", "dp=2 pp=2 layers=3+1"),
        (2, "save memory", "dp=2 pp=2 layers=3+1"),
        (1, "stay", "dp=2 pp=2 layers=3+1"),
        (4, "shrink", "dp=4"),
    ]
    assert reported[1].why == "dp=4 does not hold the batch, not even by recomputing or offloading"
    assert (reported[1].keep_s, reported[1].save_s, reported[1].gain_s) == (None, None, None)
    assert reported[2].why == (
        # Stages of one layer each would hold it, but not what a switch leaves behind beside their first step.
        "dp=2 pp=2 layers=3+1 holds the batch by offloading documents; no other layout does"
    )
    assert reported[3].is_patient
    assert reported[3].why.endswith("less time, for 1 of 2 steps in a row now")
    assert reported[4].why == "dp=4 with the switch takes 30.8 % less time than dp=2 pp=2 layers=3+1"
    assert reported[4].gain_s == pytest.approx(reported[4].keep_s - reported[4].new_s - reported[4].switch_s)
    assert reported[4].gain_s > 0
    assert [one.is_switch for one in reported] == [False, True, False, False, True]
    assert msgspec.json.decode(msgspec.json.encode(reported), type=list[LayoutDecision]) == reported


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
    result = flex.propose(0, documents(SHORT), measured=high)
    assert (result.told.case, result.told.fits) == (3, False)
    assert result.proposal.plan.predicted.peak_memory_bytes < peak_bytes
    # Where none has room, training goes on with what fits by prediction.
    full = flex.propose(0, documents(SHORT), measured=MeasuredLayouts().with_peak(100.0))
    assert full.told.action == "stay"
    assert full.proposal.feasible
    assert full.told.why == "dp=4 holds the batch as predicted; by measured memory no layout does"
    assert make(4, 1, 30_000).propose(0, documents(LONG)).told.why == "no layout holds the batch"


def test_a_resumed_run_goes_to_the_layout_of_its_checkpoint_where_that_has_room() -> None:
    """Processes start in one replica of four stages, the checkpoint's steps ran in four of one. The step fits there to
    the byte; what the ranks leave behind lies beside it."""
    flat = msgspec.structs.replace(even_layout(4, dp=4), generation=1)
    plan = make(4, 1, None).propose(0, documents(SHORT), state=FlexState(layout=flat)).proposal.plan
    takes = switch_memory(SENT, even_layout(4, pp=4), flat)
    needed = max(takes.switch_bytes, plan.predicted.peak_memory_bytes + takes.left_bytes)
    assert needed > plan.predicted.peak_memory_bytes
    make(1, 4, needed).require_headroom(even_layout(4, pp=4), plan)
    with pytest.raises(InfeasiblePlanError, match="processes start in pp=4 and step 0 is planned for dp=4") as reported:
        make(1, 4, needed - 1).require_headroom(even_layout(4, pp=4), plan)
    assert "start in dp=4 ([parallel])" in str(reported.value)
    # Where it runs already nothing changes.
    make(4, 1, plan.predicted.peak_memory_bytes).require_headroom(even_layout(4, dp=4), plan)


def test_the_first_step_behind_a_switch_makes_room_for_what_it_leaves() -> None:
    """In four replicas the step takes nearly all memory when it stores everything; beside the state that other ranks
    still read it has less, and saves memory. The steps behind it have all."""
    flex, cap_bytes = make(2, 2, 280_000, 1e9, **PUBLISHED), 280_000
    usual = make(4, 1, cap_bytes).propose(0, documents(MIDDLE)).proposal.plan.predicted
    result = flex.propose(0, documents(MIDDLE))
    plan = result.proposal.require_feasible()
    assert (result.told.action, plan.layout.describe()) == ("shrink", "dp=4")
    takes = switch_memory(SENT, even_layout(4, dp=2, pp=2), plan.layout)
    assert usual.peak_memory_bytes + takes.left_bytes > cap_bytes
    assert plan.predicted.peak_memory_bytes + takes.left_bytes <= cap_bytes
    assert plan.predicted.step_time_s - result.proposal.switch_s >= usual.step_time_s
    behind = flex.propose(1, documents(MIDDLE), state=result.state).proposal.plan
    assert behind.predicted == usual
