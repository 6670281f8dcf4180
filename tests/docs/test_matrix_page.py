"""docs/training.md: what is tested together and what is refused."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_committed_tables_are_those_of_the_matrix():
    """A rule without documentation, or documentation of a rule that is gone; run tools/make_matrix.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_matrix.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["page_with_tables"]()
