"""Every figure of the README has a source, and says what the source says.

Tables and sentences between "make docs" comments are made of rows (test_made_pages.py compares them).
What is written by hand must stand in CLAIMS, with the place that it comes from; names with digits stand in NAMES.
"""

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("C++20", "Python 3.11", "FSDP2", "in 2026", "FLOPs of one 7B model", "aarch64", "Apache-2.0")
_WORDS = (
    r"(?i:\btwice\b|\b(?:an?|half|two|three|four|five|ten) (?:seconds?|minutes?|hours?|times|thirds?|quarters?|half)\b)"
)


def guide_factor(readme: str) -> str:
    """What the comparison in docs/plan.md prints of `auto`; the picture is of one batch, of several it is less."""
    guide = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split("<!-- strategies output: make docs -->")[1]
    (factor,) = re.findall(r"^ ▶ auto .*?([0-9.]+)×", guide.split("<!-- end of")[0], flags=re.M)
    return factor


def rows_of(page: str, first: str) -> list[list[str]]:
    """Cells of the rows of a page's tables that begin with a text."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith(f"| {first}")]


def asymmetric_gain(readme: str) -> str:
    """Of asymmetric over symmetric cuts inside the static order, on llama-150b with 16 stages, in percent."""
    with (ROOT / "benchmarks" / "results" / "ablation.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"].startswith("llama-150b")]
    shares = {row["metric"]: float(row["value"]) for row in rows}
    asymmetric, symmetric = (shares[f"{cut} cuts, static order"] for cut in ("asymmetric", "symmetric"))
    return f"{100 * (asymmetric / symmetric - 1):.1f}"


def switching_factor(readme: str) -> str:
    """The mean of `flexpipe` against its own packing in the best fixed layout."""
    ((_, ratio, _),) = rows_of("benchmarks.md", "its own packing in the best fixed layout |")
    return ratio.split()[0]


def swinging_factor(readme: str) -> str:
    """The smaller of the measured factors over both layouts."""
    ((_, factors, *_),) = rows_of("benchmarks.md", '<a id="swinging-phases">')
    return min(re.findall(r"([\d.]+)× \(", factors))


CLAIMS = {
    r"\[([\d.]+) %\]\(docs/benchmarks.md#which-ideas-pay\)": asymmetric_gain,
    r"\[([\d.]+) times\]\(docs/benchmarks.md#flexpipes-settings\)": switching_factor,
    r"\[([\d.]+) times\]\(docs/benchmarks.md#swinging-phases\)": swinging_factor,
    r"over four batches `auto` is ([\d.]+) times as fast as tuned `best_fit` \(\[guide\]\(docs/plan.md": guide_factor,
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
