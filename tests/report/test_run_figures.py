import re

import pytest

from evenload.report.figures import largest, typical, typical_meaning
from evenload.report.html import render_report
from evenload.report.run_report import RunReport, RunSection, StepView
from report_samples import make_plan, make_row, make_split, make_timeline

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
    # Memory is largest where it warms up.
    assert largest(rows, "peak_memory_bytes") == 5 * 2**30


@pytest.mark.parametrize(
    ("count", "value", "meaning"), [(1, 90.0, "only step"), (2, 10.1, "second of 2 steps")], ids=["one", "two"]
)
def test_short_runs_have_a_number_too(count, value, meaning):
    rows = make_section().metrics[:count]
    assert typical(rows, "step_time_s") == value
    assert typical_meaning(rows) == meaning


def test_what_no_step_has_is_not_known():
    assert typical([make_row(1, mfu=None), make_row(2, mfu=None)], "mfu") is None


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


def test_predictions_among_measurements_say_so():
    section = make_section()
    page = render_report(RunReport(title="demo", sections=(section,), comparison=(row_of(section),)))
    assert "Predicted seconds of a step, by cause" in page
    assert "8.44 s predicted, 100.0 % useful" in page
    assert "<b>predicted</b> too, for the last step (slimpack step 4)" in page


def _of_the_split(body):
    """Step times in the picture of predicted causes, which says "predicted" beside them."""
    return set(re.findall(r"(\d+\.\d+) s predicted,", body))
