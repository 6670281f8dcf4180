"""docs/planner.md's shares of the lower bound under SlimPack's models, from the newest rows of paper_slimpack.csv.

python tools/make_bound_shares.py      part of `make docs`; a test fails when page and rows differ
"""

import csv
import re
import statistics
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner.md"
RESULTS = ROOT / "benchmarks" / "results" / "paper_slimpack.csv"
BEGIN, END = "<!-- shares of the bound: make docs -->\n", "<!-- end of shares of the bound -->\n"
TABLES = ("commoncrawl_like", "github_dirs")
SHOWN = 0.01
"""Causes below this share of a step are left out."""
NAMES = {"small packs and slices": "small packs", "gradient reduction": "reduction", "useful work": ""}


class Cell(NamedTuple):
    """A model, context and table of lengths under `auto`: share of the bound, its layout, shares by cause."""

    fraction: float
    layout: str
    lost: dict[str, float]
    commit: str


def cells() -> tuple[dict[tuple[str, str, str, str], Cell], str]:
    """By model, devices, context and table, of each the newest run; and the newest commit of all."""
    newest: dict[str, list[dict[str, str]]] = {}
    commit = ""
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            own = newest.setdefault(row["case"], [])
            if own and (own[-1]["date"], own[-1]["commit"]) != (row["date"], row["commit"]):
                own = newest[row["case"]] = []
            own.append(row)
            commit = row["commit"]
    found = {}
    for case, rows in newest.items():
        named = re.fullmatch(r"(\S+) on (\d+) H100, (\d+K), (\w+), auto, simulated", case)
        if named is None:
            continue
        (bound,) = (row for row in rows if row["metric"] == "of bound")
        shares = ((row["metric"], float(row["value"])) for row in rows if row["metric"].startswith("share: "))
        lost = {cause.removeprefix("share: "): share for cause, share in shares}
        model, devices, context, table = named.groups()
        found[model, devices, context, table] = Cell(float(bound["value"]), bound["baseline"], lost, bound["commit"])
    return found, commit


def bound_shares() -> str:
    """Markdown lines: a table, and what it comes to."""
    found, newest = cells()
    lines = [f"| model, devices | context | {' | '.join(f'`{table}`' for table in TABLES)} |", "|---|---|---|---|"]
    for model, devices, context in dict.fromkeys(key[:3] for key in found):
        own = [found[model, devices, context, table] for table in TABLES]
        texts = (_text(cell) + " \\*" * (cell.commit != newest) for cell in own)
        lines.append(f"| {model}, {devices} | {context} | {' | '.join(texts)} |")
    told = f"{_in_all([cell.fraction for cell in found.values()])}. Commit `{newest}`."
    older = dict.fromkeys(cell.commit for cell in found.values() if cell.commit != newest)
    if older:
        named = ", ".join(f"`{commit}`" for commit in older)
        told += (
            f" Cells with \\* are from older commits ({named}), planned and priced as it was then; without them "
            f"{_in_all([cell.fraction for cell in found.values() if cell.commit == newest])}."
        )
    return "\n".join([*lines, "", told, ""])


def _in_all(fractions: list[float]) -> str:
    reached = sum(fraction >= 0.92 for fraction in fractions)
    mean, least = statistics.mean(fractions), min(fractions)
    return f"{reached} of {len(fractions)} cells reach 92 %, the mean is {mean:.1%}, the least {least:.1%}"


def _text(cell: Cell) -> str:
    lost = sorted(((share, NAMES.get(cause, cause)) for cause, share in cell.lost.items()), reverse=True)
    told = ", ".join(f"{name} {share:.1%}" for share, name in lost if name and share >= SHOWN)
    return f"{cell.fraction:.1%} ({cell.layout}): {told or 'nothing above 1 %'}"


def page_with_shares() -> str:
    """The page with the block replaced."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + bound_shares() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with_shares(), encoding="utf-8")
