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


@pytest.mark.parametrize(
    ("tool", "made"),
    [
        ("make_planning_times", "page_with_times"),
        ("make_bound_shares", "page_with_shares"),
        ("make_flexpipe_gains", "page_with_gains"),
        ("make_planner_tables", "page_with_tables"),
        ("make_installs", "page_with_table"),
        ("make_engines", "page_with_comparison"),
    ],
)
def test_a_page_is_what_its_tool_makes_of_the_newest_rows(tool, made):
    """Run the tool in tools/, or all of them: make docs."""
    script = runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script[made]()
