"""What docs/plan.md and the guide show of `evenload plan` is what it prints today; run tools/make_plan_pages.py."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "tools" / "make_plan_pages.py"))


def test_the_page_shows_what_the_command_prints(script):
    page = script["PLAN"].read_text(encoding="utf-8")
    assert script["block_of"](page, "plan output") == script["plan_output"]()
    assert " ".join(script["PLAN_COMMAND"]) in _commands(page)


def test_the_guide_shows_what_its_commands_print(script):
    page = script["GUIDE"].read_text(encoding="utf-8")
    blocks = script["cheap_blocks"](script["run"](script["STRATEGIES"], script["GUIDE_WIDTH"]))
    for name, block in blocks.items():
        assert script["block_of"](page, name) == block, name
    for command in ("STRATEGIES", "SEARCH", "LENGTHS"):
        assert " ".join(script[command]) in _commands(page)


def test_the_layout_that_the_guide_says_wins_is_planned_as_it_says(script):
    """The search itself takes minutes, so it runs in `make docs` only."""
    page = script["GUIDE"].read_text(encoding="utf-8")
    output, _ = script["run"](script["winner"](page), script["GUIDE_WIDTH"])
    assert script["block_of"](page, "winner output") == script["fenced"](output)


def _commands(page):
    """The page with continued lines joined."""
    return " ".join(page.replace("\\\n", " ").split())
