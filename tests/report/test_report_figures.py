import msgspec
import numpy as np
import pytest

from evenload.report.figures import loss_figure, step_time_figure, tokens_per_s_figure
from evenload.report.pack_time_figure import pack_time_figure, relative_times
from evenload.report.run_figures import metric_column
from evenload.report.time_split_figure import time_split_figure
from evenload.types.pack_times import pack_times
from evenload.types.time_split import CAUSE_LABELS
from report_samples import make_plan, make_row, make_split, make_timeline


def test_curves_are_the_rows_values_with_gaps_and_the_latest_of_a_repeated_step():
    rows = [make_row(1), make_row(2, loss=None), make_row(3), make_row(2, loss=7.5)]
    loss = loss_figure({"<i>a": rows, "b": rows[:2]})
    assert loss.data[0].x.tolist() == [1, 2, 3]
    assert loss.data[0].y[1] == 7.5
    assert loss.data[0].name == "&lt;i&gt;a"
    assert np.isnan(loss.data[1].y[1])
    assert tokens_per_s_figure({"a": rows}).data[0].y[0] == rows[0]["tokens_per_s"]
    assert metric_column([make_row(1, mfu=0)], "mfu").tolist() == [0.0]


def test_step_time_shows_predicted_and_measured_and_only_what_exists():
    rows = [make_row(step) for step in range(5)]
    figure = step_time_figure(rows)
    assert {trace.name: trace.y.tolist() for trace in figure.data} == {
        "predicted": [row["predicted_step_time_s"] for row in rows],
        "measured": [row["step_time_s"] for row in rows],
    }
    unpredicted = [make_row(1, predicted_step_time_s=None)]
    assert [trace.name for trace in step_time_figure(unpredicted).data] == ["measured"]


def test_pack_times_are_relative_to_the_mean_of_their_replica():
    t = make_timeline(3, 4, 8)
    times = pack_times(t, "forward")
    found = relative_times(t, make_plan(3, 8), "forward")
    assert len(found) == 24
    for replica in range(3):
        seconds = times.seconds[times.dp_rank == replica]
        assert np.allclose(found[8 * replica : 8 * replica + 8], seconds / seconds.mean())
    assert found.max() == pytest.approx(times.imbalance())
    assert np.array_equal(found, relative_times(t, None, "forward"))


def test_packs_that_replicas_share_are_a_set_of_their_own():
    """The planner counts them apart; the picture must not call a plan uneven that the table calls even."""
    t, plan = make_timeline(1, 1, 6), make_plan(1, 6, num_ranks=1)
    shared = {1, 4}
    (replica,) = plan.pack_plans
    forward = tuple(
        msgspec.structs.replace(
            pack,
            slices=tuple(msgspec.structs.replace(one, cp=2 if pack.index in shared else 1) for one in pack.slices),
        )
        for pack in replica.forward
    )
    plan = msgspec.structs.replace(plan, pack_plans=(msgspec.structs.replace(replica, forward=forward),))
    seconds = pack_times(t, "forward").seconds
    found = relative_times(t, plan, "forward")
    alone = [k for k in range(6) if k not in shared]
    expected = [*(seconds[alone] / seconds[alone].mean()), *(seconds[[1, 4]] / seconds[[1, 4]].mean())]
    assert found == pytest.approx(expected)


def test_pack_time_shapes_hold_all_packs_of_all_steps_and_the_imbalance():
    few = {"predicted": ((make_timeline(2, 4, 8), None), (make_timeline(2, 4, 8, seed=1), None))}
    many = {"predicted": ((make_timeline(1, 4, 60), None),)}
    figure = pack_time_figure({"auto": few, "<b>": many})
    points, violin = (trace for trace in figure.data if trace.xaxis == "x")
    assert (points.type, violin.type) == ("scatter", "violin")
    assert len(points.x) == 2 * 2 * 8
    assert np.allclose(violin.x, relative_times(*many["predicted"][0], "forward"))
    assert len([trace for trace in figure.data if trace.xaxis == "x2"]) == 2
    notes = [annotation.text for annotation in figure.layout.annotations]
    for direction in ("forward", "backward"):
        # The comparison shows the mean over the steps, so the picture does too.
        assert f"{np.mean([pack_times(t, direction).imbalance() for t, _ in few['predicted']]):.3f}" in notes
    assert list(figure.layout.yaxis.ticktext) == ["auto", "&lt;b&gt;"]


def test_predicted_and_measured_packs_lie_side_by_side_and_are_named():
    both = {"predicted": ((make_timeline(), None),), "measured": ((make_timeline(noise=0.5), None),)}
    figure = pack_time_figure({"auto": both})
    assert list(figure.layout.yaxis.ticktext) == ["auto, predicted", "auto, measured"]
    assert [trace.marker.symbol for trace in figure.data if trace.xaxis == "x"] == ["circle-open", "circle"]


def test_a_pack_far_slower_than_all_others_is_named_and_leaves_room_for_the_rest():
    """One strategy with one huge pack would squeeze every other shape to a line."""
    t = make_timeline(1, 1, 50)
    slow = (t.pack == 7) & (t.kind == 0)
    t.end_s[slow] += 30 * (t.end_s[slow] - t.start_s[slow])
    figure = pack_time_figure({"a": {"predicted": ((t, None),)}})
    assert figure.layout.xaxis.range[1] < 6
    slowest = relative_times(t, None, "forward").max()
    assert slowest > 6
    assert any(f"slowest {slowest:.1f}×" in annotation.text for annotation in figure.layout.annotations)


def test_stacked_parts_add_up_to_the_step_time_and_causes_of_nothing_are_left_out():
    splits = {"auto": make_split(useful_s=3.0, padding_s=0.5), "b": make_split(useful_s=3.0, dependency_s=2.5)}
    figure = time_split_figure(splits)
    assert [bar.name for bar in figure.data] == ["useful work", "padding", "dependency"]
    assert [sum(bar.x[i] for bar in figure.data) for i in range(2)] == [3.5, 5.5]
    notes = [annotation.text for annotation in figure.layout.annotations]
    assert notes == ["3.50 s predicted, 85.7 % useful", "5.50 s predicted, 54.5 % useful"]
    assert figure.data[1].customdata[0] == "500 ms, 14.3 % of the step"


def test_every_cause_has_a_colour_of_its_own():
    figure = time_split_figure({"a": make_split(**dict.fromkeys(CAUSE_LABELS, 1.0))})
    colors = [bar.marker.color for bar in figure.data]
    assert len(set(colors)) == len(CAUSE_LABELS)
