import json
import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest

from evenload.errors import ConfigError
from evenload.report.html import comparison_html, render_report, write_report
from evenload.report.run_report import RunReport, RunSection, StepView
from report_samples import make_plan, make_row, make_split, make_timeline

EVIL = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>&\"'"


def make_report(text="auto") -> RunReport:
    rows = tuple(make_row(step) for step in range(1, 6))
    view = StepView(
        step=3,
        predicted=make_timeline(2, 4, 8, critical=np.arange(0, 60, 7)),
        measured=make_timeline(2, 4, 8, noise=0.2),
        plan=make_plan(2, 8, reason=text),
    )
    more = {"time_split": make_split(useful_s=1.0, padding_s=0.25), "memory_limit_bytes": 80 * 2**30, "notes": (text,)}
    trained = RunSection(name=text, metrics=rows, steps=(view,), **more)
    steps = tuple(StepView(step=step, predicted=make_timeline(2, 4, 8, seed=step)) for step in (1, 2))
    simulated = RunSection(name="best_fit", steps=steps, time_split=make_split(useful_s=1.0, dependency_s=1.0))
    comparison = (
        {"name": text, "mean_step_time_s": 1.2, "layout": text},
        {"name": "padded", "feasible": False, "why": text},
    )
    result = {"facts": ((text, text),), "comparison": comparison, "best": text, "ledger": (text,)}
    return RunReport(title=text, sections=(trained, simulated), **result)


class Page(HTMLParser):
    """Elements, attributes that load, and the text outside of scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.loads, self.text, self.data = [], [], [], {}
        self._script = None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        assert not [name for name in attributes if name.startswith("on")], "no inline handlers"
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag in ("script", "style"):
            self._script = attributes.get("id", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._script = None

    def handle_data(self, data):
        if self._script:
            self.data[self._script] = self.data.get(self._script, "") + data
        else:
            self.text.append(data)


def test_page_loads_nothing_from_the_network():
    page = render_report(make_report())
    parsed = Page(page)
    assert {load for load in parsed.loads if not load.startswith("#")} == {"data:,"}
    assert "default-src 'none'" in page
    assert "@import" not in parsed.data["style"]
    assert "url(" not in parsed.data["style"]
    assert not re.findall(r"https?://", page)


def test_hostile_strings_stay_text_everywhere():
    """A document name or a path must not run as script in a colleague's browser."""
    harmless, hostile = Page(render_report(make_report())), Page(render_report(make_report(EVIL)))
    assert hostile.tags == harmless.tags
    text = "".join(hostile.text)
    # Title twice, fact name and value, note with its name, heading, comparison name, layout and reason, ledger.
    assert text.count(EVIL) >= 10
    assert len(hostile.data) == len(harmless.data)


def test_the_data_of_all_steps_travel_and_every_figure_stands_once():
    page = render_report(make_report())
    parsed = Page(page)
    steps = json.loads(parsed.data["step-view-data"])
    assert [len(section["steps"]) for section in steps["sections"]] == [1, 2]
    blocks = [name for name in parsed.data if name.startswith("block-")]
    drawn = [one for section in steps["sections"] for one in section["steps"]]
    parts = [part for one in drawn for part in (*one["views"].values(), one["plan"]) if part]
    assert sorted(part["block"] for part in parts) == sorted(blocks)
    assert len(blocks) == 3 + 2
    assert figures(page) == ["all-split", "run-0-time", "run-0-loss", "run-0-speed", "step-view"]


def figures(page):
    return re.findall('<figure id="([^"]*)"', page)


def test_a_page_begins_with_what_was_found_and_folds_its_settings():
    page = render_report(make_report())
    begin = [page.index(one) for one in ("<h1>", '<dl class="tiles">', "<table>")]
    assert begin == sorted(begin)
    assert '<details class="settings"><summary>Settings</summary><dl class="facts">' in page
    assert "<details open" not in page
    assert '<p class="headline">said before.</p>' in render_report(RunReport(title="t", headline="said before."))


def split_row(name, seconds, **losses):
    split = make_split(useful_s=1.0, **losses)
    return {"name": name, "mean_step_time_s": seconds, "time_split": msgspec.to_builtins(split)}


def test_why_strategies_lose_stands_beside_their_names_and_other_columns_are_folded():
    rows = [split_row("auto", 1.2, padding_s=0.2) | {"imbalance_forward": 1.5, "plan_time_s": 0.1}]
    page = comparison_html(rows, ("auto",), "tokens")
    first, more = page.split("<details")
    assert re.findall(r'<th scope="col"[^>]*>([^<]*)', first) == ["strategy", "step", "lost to"]
    assert "extra compute 16.7 %" in first
    assert "1.500" in more
    assert "1.500" not in first


def test_page_says_what_is_predicted_measured_refused_and_missing():
    text = "".join(Page(render_report(make_report())).text)
    # The note of a strategy with its name, and why another is refused.
    for part in ("Step time, predicted and measured", "auto: auto", "padded", "not feasible: auto"):
        assert part in text
    rows = [make_row(step) for step in range(1, 6)]
    error = sum(abs(row["predicted_step_time_s"] / row["step_time_s"] - 1) for row in rows) / 5
    assert f"Mean absolute error of the prediction over 5 steps: {100 * error:.1f} %." in text
    step = StepView(step=1, predicted=make_timeline(memory=False))
    unmeasured = RunSection(name="a", metrics=tuple(rows), steps=(step,))
    text = "".join(Page(render_report(RunReport(title="t", sections=(unmeasured,)))).text)
    assert "Not in this report: measured timeline, predicted memory over time." in text


def test_a_report_with_a_diverged_loss_or_nothing_at_all_is_still_a_page(tmp_path):
    path = tmp_path / "report.html"
    rows = (make_row(1, loss=float("nan"), predicted_step_time_s=None), make_row(2, loss=None, step_time_s=None))
    write_report(path, RunReport(title="t", sections=(RunSection(name="a", metrics=rows), RunSection(name="b"))))
    text = "".join(Page(path.read_text(encoding="utf-8")).text)
    assert "No step has both numbers." in text
    write_report(path, RunReport(title="empty"))
    assert "empty" in path.read_text(encoding="utf-8")


def test_equal_section_names_are_refused():
    with pytest.raises(ConfigError, match="names must differ"):
        render_report(RunReport(title="t", sections=(RunSection(name="a"), RunSection(name="a"))))


def test_a_page_says_where_it_has_not_all_steps():
    rows = tuple(make_row(step) for step in range(9))
    views = tuple(StepView(step=step, predicted=make_timeline(1, 2, 3)) for step in (0, 4, 8))
    page = render_report(RunReport(title="t", sections=(RunSection(name="a", metrics=rows, steps=views),)))
    assert "3 of 9 steps can be looked at here" in page
    all_of_them = RunSection(name="a", metrics=rows[:3], steps=views)
    assert "can be looked at" not in render_report(RunReport(title="t", sections=(all_of_them,)))


def test_pages_are_small_enough_to_be_mailed():
    """About twice what they have: 21 KB, 129 KB, and 367 KB for a demo, two strategies over 24 steps."""
    assert len(render_report(RunReport(title="t"))) < 40_000
    assert len(render_report(make_report())) < 200_000
    timelines = [[make_timeline(1, 2, 24, seed=seed, noise=noise) for noise in (0.0, 0.2)] for seed in range(24)]
    views = tuple(
        StepView(step=step, predicted=predicted, measured=measured, plan=make_plan(1, 24))
        for step, (predicted, measured) in enumerate(timelines)
    )
    rows = tuple(make_row(step) for step in range(24))
    sections = tuple(
        RunSection(name=name, steps=views, metrics=of_run) for name, of_run in (("auto", rows), ("best_fit", ()))
    )
    assert len(render_report(RunReport(title="demo", sections=sections)).encode()) < 700_000
