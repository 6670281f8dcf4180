"""The README's figures."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_figures_of_the_readme_are_the_newest_rows():
    """A figure that no row backs; run tools/make_measured.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_measured.py"))
    assert script["README"].read_text(encoding="utf-8") == script["readme_with_table"]()


def test_planning_times_are_the_newest_rows():
    """The planner's page; run tools/make_planning_times.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_planning_times.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page_with_times"]()


def test_what_changing_the_layout_gains_is_of_the_newest_rows():
    """The planner's page; run tools/make_flexpipe_gains.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_flexpipe_gains.py"))
    assert (ROOT / "docs" / "planner.md").read_text(encoding="utf-8") == script["page_with_gains"]()
