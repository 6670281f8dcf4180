"""docs/loader_performance.md."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_committed_loader_performance_page_is_the_generated_one():
    """Figures without rows, or rows that the page does not show; run tools/make_loader_performance.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_loader_performance.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["performance_page"]()


def test_the_readme_says_what_the_rows_say():
    """Packed against padded training, with TRL's packing beside ours."""
    script = runpy.run_path(str(ROOT / "tools" / "make_loader_performance.py"))
    assert script["README"].read_text(encoding="utf-8") == script["readme_with_ratios"]()
