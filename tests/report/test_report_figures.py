import time

import numpy as np
import pytest

from evenload.errors import DataError
from evenload.report.figures import (
    loss_figure,
    memory_figure,
    metric_column,
    pack_time_figure,
    step_time_figure,
    tokens_per_s_figure,
)
from evenload.report.timeline_figure import choose_replicas, timeline_figure
from evenload.types.pack_times import pack_times
from evenload.types.timeline import KINDS
from report_samples import make_labels, make_row, make_timeline


def task_bars(figure, panel):
    """(row, start, length, stage, pack) of all task bars of a panel."""
    axis = "x" if panel == 1 else f"x{panel}"
    rows = []
    for bar in figure.data:
        if bar.xaxis == axis and bar.legendgroup != "idle":
            columns = np.asarray(bar.customdata)
            for i, length in enumerate(bar.x):
                rows.append(
                    (float(bar.y[i]), float(bar.base[i]), float(length), bar.legendgroup, *columns[i, :2].astype(int))
                )
    return rows


@pytest.mark.parametrize("split", [False, True])
def test_every_task_is_one_bar_with_the_timelines_numbers(split):
    predicted, measured = make_timeline(2, 4, 8, split=split), make_timeline(2, 4, 8, noise=0.2, split=split)
    figure = timeline_figure({"predicted": predicted, "measured": measured}, make_labels(2, 8))
    for panel, t in enumerate((predicted, measured), start=1):
        # Rows from the top, with half a row between replicas.
        row = {(dp, rank): dp * 4.5 + rank for dp in range(2) for rank in range(4)}
        expected = [
            (
                row[t.dp_rank[i], t.rank[i]],
                t.start_s[i],
                t.end_s[i] - t.start_s[i],
                KINDS[t.kind[i]],
                t.stage[i],
                t.pack[i],
            )
            for i in range(t.num_tasks)
        ]
        assert sorted(task_bars(figure, panel)) == sorted(expected)


def test_panels_share_the_time_axis_and_name_their_origin():
    predicted, measured = make_timeline(), make_timeline(noise=0.5)
    figure = timeline_figure({"predicted": predicted, "measured": measured})
    assert (figure.layout.xaxis.matches, figure.layout.xaxis2.matches) in {("x2", None), (None, "x")}
    texts = [annotation.text for annotation in figure.layout.annotations]
    assert texts[0].startswith("<b>Predicted</b>")
    assert texts[1].startswith("<b>Measured</b>")
    assert f"{100 * (measured.step_time_s / predicted.step_time_s - 1):+.1f} %" in texts[1]
    # Predicted lies over measured.
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]


def test_neighbouring_packs_and_directions_differ_in_colour():
    figure = timeline_figure({"measured": make_timeline(split=True)})
    colors = {(bar.legendgroup, int(np.asarray(bar.customdata)[0, 1]) % 2): bar.marker.color for bar in figure.data[1:]}
    assert len(set(colors.values())) == len(colors) == 6


def test_labels_are_text_and_never_markup():
    labels = make_labels(1, 8, text='<a href="javascript:alert(1)">x</a>&')
    figure = timeline_figure({"<b>evil": make_timeline()}, labels)
    assert {text for bar in figure.data[1:] for text in bar.hovertext} == {
        '&lt;a href="javascript:alert(1)"&gt;x&lt;/a&gt;&amp;'
    }
    assert "<b>evil" not in figure.layout.annotations[0].text.lower().removeprefix("<b>")


def test_a_missing_label_is_not_shown_as_zero_tokens():
    labels = make_labels(1, 8)
    del labels[0, "forward", 2]
    figure = timeline_figure({"measured": make_timeline()}, labels)
    for bar in figure.data[1:]:
        for pack, tokens in np.asarray(bar.customdata)[:, [1, 5 + 2]]:
            absent = bar.legendgroup == "F" and pack == 2
            assert np.isnan(tokens) if absent else tokens == 4608 + pack


def test_sixteen_ranks_of_512_packs_need_few_traces_and_little_time():
    """Thousands of traces would hang the browser; the page must stay usable at this size."""
    timelines = {"predicted": make_timeline(1, 16, 512), "measured": make_timeline(1, 16, 512, noise=0.1)}
    begin = time.perf_counter()
    figure = timeline_figure(timelines, make_labels(1, 512))
    text = figure.to_json()
    assert len(figure.data) == 2 * (1 + 4)
    assert len(task_bars(figure, 1)) == 16 * 512 * 2
    assert len(text) < 12e6
    assert time.perf_counter() - begin < 20


def test_of_too_many_replicas_those_that_end_last_are_drawn():
    t = make_timeline(4, 2, 4)
    ends = {dp: t.end_s[t.dp_rank == dp].max() for dp in range(4)}
    slowest = sorted(sorted(ends, key=lambda dp: -ends[dp])[:2])
    assert choose_replicas([t], max_bars=2 * (2 * 4 * 2)) == slowest
    assert choose_replicas([t], max_bars=1) == [max(ends, key=lambda dp: ends[dp])]
    assert choose_replicas([t]) == [0, 1, 2, 3]
    assert choose_replicas([]) == []
    figure = timeline_figure({"measured": t}, dp_ranks=slowest)
    assert len(task_bars(figure, 1)) == 2 * 2 * 4 * 2


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


def test_pack_time_boxes_hold_the_pack_times_and_the_imbalance():
    predicted, measured = make_timeline(2, 4, 8), make_timeline(2, 4, 8, noise=0.3)
    figure = pack_time_figure({"auto": {"predicted": predicted, "measured": measured}, "b": {"predicted": predicted}})
    boxes = [trace for trace in figure.data if trace.type == "box"]
    assert len(boxes) == 6
    for direction, axis in (("forward", "x"), ("backward", "x2")):
        by_origin = {box.legendgroup: box.x for box in boxes if box.xaxis == axis and box.y[0] < 0.5}
        assert np.array_equal(by_origin["predicted"], pack_times(predicted, direction).seconds)
        assert np.array_equal(by_origin["measured"], pack_times(measured, direction).seconds)
    notes = [annotation.text for annotation in figure.layout.annotations]
    assert f"{pack_times(measured, 'backward').imbalance():.3f}" in notes
    centers = [box.y[0] for box in boxes if box.xaxis == "x"]
    assert len(set(centers)) == len(centers)


def test_memory_lines_hold_all_samples_and_the_limit():
    t = make_timeline(2, 4, 8)
    figure = memory_figure({"predicted": t, "measured": make_timeline(memory=False)}, limit_bytes=80 * 2**30)
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines) == ["rank 0", "rank 1", "rank 2", "rank 3", "limit 80.0 GiB"]
    assert list(lines["limit 80.0 GiB"].y) == [80, 80]
    for rank in range(4):
        drawn = np.asarray(lines[f"rank {rank}"].y)
        for dp, part in enumerate(np.split(drawn, np.flatnonzero(np.isnan(drawn)) + 1)[:2]):
            samples = t.memory_bytes[(t.memory_rank == rank) & (t.memory_dp_rank == dp)] / 2**30
            assert np.array_equal(part[:-2], samples)
    with pytest.raises(DataError, match="no timeline has memory samples"):
        memory_figure({"measured": make_timeline(memory=False)})
