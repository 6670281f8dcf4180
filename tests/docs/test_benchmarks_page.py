"""docs/benchmarks.md."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_committed_benchmarks_page_is_the_generated_one():
    """Figures without rows, or rows that the page does not show; run tools/make_benchmarks.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_benchmarks.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["benchmarks_page"]()
