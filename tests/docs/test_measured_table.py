"""Measured figures of the README and docs/measured.md."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("page", "table"), [("README", "short_table"), ("PAGE", "measured_table")])
def test_figures_are_the_newest_rows(page, table):
    """A figure that no row backs; run tools/make_measured.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_measured.py"))
    made = script[table]()
    assert made.count("\n| ") >= 4
    assert script[page].read_text(encoding="utf-8") == script["with_table"](script[page], made)


def test_planning_times_are_the_newest_rows():
    """The planner's page; run tools/make_planning_times.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_planning_times.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page_with_times"]()


def test_shares_of_the_bound_are_the_newest_rows():
    """The planner's page; run tools/make_bound_shares.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_bound_shares.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page_with_shares"]()


def test_what_changing_the_layout_gains_is_of_the_newest_rows():
    """The planner's page; run tools/make_flexpipe_gains.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_flexpipe_gains.py"))
    assert (ROOT / "docs" / "planner.md").read_text(encoding="utf-8") == script["page_with_gains"]()


def test_tables_of_the_planners_page_are_the_newest_rows():
    """Documents that wait, HBSA, ideas that pay, exact solutions; run tools/make_planner_tables.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_planner_tables.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page_with_tables"]()


def test_environments_that_were_tried_are_the_newest_rows():
    """docs/install.md; run tools/make_installs.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_installs.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page_with_table"]()


def test_the_comparison_of_engines_page_is_the_newest_rows():
    """Plans for dynamic context parallelism; run tools/make_engines.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_engines.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page_with_comparison"]()
