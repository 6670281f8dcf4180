"""Figures of a report hold the numbers of rows, packs and causes."""

import json
import re

import numpy as np
import pytest

from evenload.report.html import render_report
from evenload.report.run_report import (
    RunReport,
    RunSection,
    StepView,
    largest,
    loss_figure,
    metric_column,
    outline,
    step_time_figure,
    time_split_figure,
    tokens_per_s_figure,
    typical,
    typical_meaning,
)
from evenload.report.svg import round_ticks, tick_labels
from evenload.types.run import LossOf, Validation
from evenload.types.timeline import CAUSE_GROUPS, CAUSE_LABELS
from report_samples import make_plan, make_row, make_split, make_timeline


def curves(figure):
    (output,) = re.findall("data-curves='([^']*)'", figure.body)
    result = json.loads(output.replace("&lt;", "<").replace("&#39;", "'").replace("&amp;", "&"))
    return result["x"], {series["name"]: series["values"] for series in result["series"]}


def test_curves_are_the_rows_values_with_gaps_and_the_latest_of_a_repeated_step():
    rows = [make_row(1), make_row(2, loss=None), make_row(3), make_row(2, loss=7.5)]
    loss = loss_figure("<i>a", rows)
    steps, values = curves(loss)
    assert steps == [1, 2, 3]
    assert values["<i>a"][1] == 7.5
    assert curves(loss_figure("b", rows[:2]))[1]["b"] == [pytest.approx(rows[0]["loss"]), None]
    assert "<i>a" not in loss.body
    _, values = curves(tokens_per_s_figure("a", rows))
    assert values["a"][0] == pytest.approx(rows[0]["tokens_per_s"])
    assert metric_column([make_row(1, mfu=0)], "mfu").tolist() == [0.0]


def test_losses_of_validation_data_stand_beside_those_of_training():
    def validation(step, loss, **changes):
        whole = LossOf(name="all", documents=1, tokens=9, label_tokens=8, loss=loss)
        return Validation(step=step, whole=whole, by_length=(), by_source=(), seconds=1.0, **changes)

    passes = [validation(1, 3.5), validation(3, None), validation(3, 2.5, of_average=True)]
    steps, values = curves(loss_figure("a", [make_row(1), make_row(2)], passes))
    assert steps == [1, 2, 3]
    assert values["a, validation"] == [3.5, None, None]
    assert values["a, validation of averaged weights"] == [None, None, 2.5]
    assert "validation" not in loss_figure("a", [make_row(1)]).body


def test_step_time_shows_predicted_and_measured_and_only_what_exists():
    rows = [make_row(step) for step in range(5)]
    _, values = curves(step_time_figure(rows))
    assert values == {
        "predicted": [pytest.approx(row["predicted_step_time_s"]) for row in rows],
        "measured": [pytest.approx(row["step_time_s"]) for row in rows],
    }
    unpredicted = [make_row(1, predicted_step_time_s=None)]
    assert list(curves(step_time_figure(unpredicted))[1]) == ["measured"]


def test_of_many_steps_a_line_keeps_the_extremes_and_the_gaps():
    """100,000 steps are drawn as a tenth of the points; a spike of one step and a missing step must still show."""
    values = np.sin(np.arange(100_000) / 900.0)
    values[54_321], values[12_345], values[77_777] = 9.0, -9.0, np.nan
    kept = outline(values)
    assert len(kept) < 8_000
    assert {0, 99_999, 54_321, 12_345, 77_777} <= set(kept.tolist())
    assert np.array_equal(outline(values[:4_000]), np.arange(4_000))


def test_stacked_parts_add_up_to_the_step_time_and_causes_of_nothing_are_left_out():
    splits = {"auto": make_split(useful_s=3.0, padding_s=0.5), "b": make_split(useful_s=3.0, dependency_s=2.5)}
    figure = time_split_figure(splits)
    assert figure.numbers.headings == ("cause", "auto", "b")
    assert [row[0] for row in figure.numbers.rows] == ["useful work", "padding", "dependency", "step"]
    assert figure.numbers.rows[1][1:] == ("500 ms, 14.3 %", "·")
    assert figure.numbers.rows[-1][1:] == ("3.50 s", "5.50 s")
    bars = [tuple(map(float, bar)) for bar in re.findall('<rect x="([^%"]*)%" width="([^%"]*)%"', figure.body)]
    assert len(bars) == 4
    for first, second in (bars[:2], bars[2:]):
        assert second[0] == pytest.approx(first[1], rel=1e-3)
    # The longest bar is 5.5 s, the other ends where 3.5 s are.
    assert (bars[1][0] + bars[1][1]) / (bars[3][0] + bars[3][1]) == pytest.approx(3.5 / 5.5, rel=1e-3)
    assert "3.50 s predicted, 85.7 % useful" in figure.body
    assert "5.50 s predicted, 54.5 % useful" in figure.body
    assert "extra compute: 500 ms, 14.3 % of the step" in figure.body
    # Every cause is in one group, and every group has a colour of its own.
    assert sorted(field for group in CAUSE_GROUPS.values() for field in group) == sorted(CAUSE_LABELS)
    figure = time_split_figure({"a": make_split(**dict.fromkeys(CAUSE_LABELS, 1.0))})
    colors = re.findall('<rect [^>]*fill="(#[^"]*)"', figure.body)
    assert len(colors) == len(set(colors)) == len(CAUSE_GROUPS) == 7


@pytest.mark.parametrize(
    ("low", "high", "kind", "expected"),
    [
        (0, 1.3, "s", ["0 s", "0.5 s", "1.0 s"]),
        (0, 0.004, "s", ["0 ms", "1 ms", "2 ms", "3 ms", "4 ms"]),
        (0, 1.05, "%", ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
        (10.312, 10.318, "", [f"10.{thousandths}" for thousandths in range(312, 319)]),
        (0, 2_100_000, "count", ["0", "500K", "1M", "1.50M", "2M"]),
        (3, 3, "", ["3"]),
    ],
)
def test_ticks_are_round_numbers_in_one_unit(low, high, kind, expected):
    assert tick_labels(round_ticks(low, high), kind) == expected


# Medians with and without the first step, mean, first and last step all differ.
SECONDS = (90.0, 10.1, 30.0, 11.0, 12.0)
PREDICTED = (9.0, 8.1, 8.2, 8.3, 8.44)


def make_section(name="slimpack"):
    """A trained run, and its last step as it is drawn."""
    rows = tuple(
        make_row(step, step_time_s=seconds, predicted_step_time_s=predicted, peak_memory_bytes=(5 - step) * 2**30)
        for step, (seconds, predicted) in enumerate(zip(SECONDS, PREDICTED, strict=True))
    )
    timeline = make_timeline()
    view = StepView(step=4, predicted=timeline, measured=make_timeline(noise=0.2), plan=make_plan(1, 8))
    split = make_split(useful_s=PREDICTED[-1])
    return RunSection(name=name, metrics=rows, steps=(view,), time_split=split)


def test_the_step_that_warms_up_is_left_out():
    rows = make_section().metrics
    assert typical(rows, "step_time_s") == 11.5
    assert typical_meaning(rows) == "median of the 4 steps after the first"
    # A step that was trained again counts once, as it was last.
    again = make_row(1, step_time_s=32.0)
    assert typical((*rows, again), "step_time_s") == 21.0
    assert typical([make_row(1, mfu=None), make_row(2, mfu=None)], "mfu") is None
    # Memory is largest where it warms up.
    assert largest(rows, "peak_memory_bytes") == 5 * 2**30


@pytest.mark.parametrize(
    ("count", "value", "meaning"), [(1, 90.0, "only step"), (2, 10.1, "second of 2 steps")], ids=["one", "two"]
)
def test_short_runs_have_a_number_too(count, value, meaning):
    rows = make_section().metrics[:count]
    assert typical(rows, "step_time_s") == value
    assert typical_meaning(rows) == meaning


def row_of(section):
    keys = {"measured_step_time_s": "step_time_s", "mean_step_time_s": "predicted_step_time_s"}
    return {"name": section.name, **{name: typical(section.metrics, key) for name, key in keys.items()}}


def test_one_step_time_a_strategy_wherever_the_page_speaks_of_the_run():
    """Table and tile: one number with its meaning; a single step's only where the step is named."""
    section = make_section()
    page = render_report(RunReport(title="demo", sections=(section,), comparison=(row_of(section),)))
    body = page[page.index("<h1>") :]
    text = re.sub(r"<[^>]*>", " ", body)
    shown = set(re.findall(r"(?<![\d.])(\d+\.\d+) s\b", text))
    assert {"11.5", "8.25"} <= shown
    # First, last and mean step, and medians over all steps, are nowhere in words or labels.
    assert not shown & {"90.0", "12.0", "30.6", "10.1", "30.0", "8.44", "8.30"} - _of_the_split(body)
    label = re.search(r'"label":"([^"]*)"', body)
    assert label is not None
    assert label[1] == "slimpack"
    assert text.count("median of the 4 steps after the first") >= 3
    # Predictions among measurements are named as such.
    assert "Predicted seconds of a step, by cause" in page
    assert "8.44 s predicted, 100.0 % useful" in page
    assert "<b>predicted</b> too, for the last step (slimpack step 4)" in page


def _of_the_split(body):
    """Step times in the picture of predicted causes, which says "predicted" beside them."""
    return set(re.findall(r"(\d+\.\d+) s predicted,", body))
