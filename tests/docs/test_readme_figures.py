"""Every figure of the README has a source, and says what the source says.

Tables and sentences between "make docs" comments are made of rows (test_made_pages.py compares them).
What is written by hand must stand in CLAIMS, with the place that it comes from; names with digits stand in NAMES.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("C++20", "Python 3.11", "FSDP2", "in 2026", "FLOPs of one 7B model", "aarch64", "Apache-2.0")
_WORDS = (
    r"(?i:\btwice\b|\b(?:an?|half|two|three|four|five|ten) (?:seconds?|minutes?|hours?|times|thirds?|quarters?|half)\b)"
)


def plan_factor(name: str) -> str:
    """What a comparison in docs/plan.md prints of `auto`."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split(f"<!-- {name}: make docs -->")[1]
    (factor,) = re.findall(r"^ ▶ auto .*?([0-9.]+)×", page.split("<!-- end of")[0], flags=re.M)
    return factor


CLAIMS = {
    r"`auto` is ([\d.]+) times as fast as tuned `best_fit`": lambda _: plan_factor("strategies output"),
    r"in the layout that suits each best, ([\d.]+) times": lambda _: plan_factor("winner output"),
}
"""A sentence with its figure, and who knows the figure."""


@pytest.fixture
def readme():
    return (ROOT / "README.md").read_text(encoding="utf-8")


def written_by_hand(page: str) -> str:
    """The page without blocks that are made, code, comments and addresses."""
    page = re.sub(r"<!-- ([^>]*): make docs -->\n.*?<!-- end of \1 -->\n", "", page, flags=re.S)
    page = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.S)
    return re.sub(r"`([^`\n]*)`", lambda code: "" if re.search(r"\d", code[1]) else code[0], page)


def without_source(page: str) -> list[str]:
    """Figures that neither CLAIMS nor NAMES know."""
    text = written_by_hand(page)
    for claim in CLAIMS:
        text = re.sub(claim, "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for name in NAMES:
        text = text.replace(name, "")
    return re.findall(rf"\S*\d\S*|{_WORDS}", text)


def test_every_figure_has_a_source(readme):
    """One more: a made block of a tool, or a line of CLAIMS."""
    assert without_source(readme) == []


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_figure_written_by_hand_is_its_sources(claim, readme):
    (figure,) = re.findall(claim, readme)
    assert figure == CLAIMS[claim](readme)
