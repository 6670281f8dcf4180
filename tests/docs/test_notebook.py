"""examples/lengths_to_packs.ipynb runs, and prints what it shows."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_the_notebook_prints_what_it_shows():
    """Run tools/make_notebook.py."""
    script = runpy.run_path(str(ROOT / "tools" / "make_notebook.py"))
    text = script["NOTEBOOK"].read_text(encoding="utf-8")
    assert text == script["text_of"](script["executed"](json.loads(text)))
