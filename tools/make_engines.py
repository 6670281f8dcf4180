"""The table of docs/engines.md that compares plans for Megatron's dynamic context parallelism, from its rows.

python tools/make_engines.py      part of `make docs`; a test fails when page and rows differ

Rows are the newest of `dynamic_cp` in benchmarks/results/results.csv.
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "benchmarks" / "results" / "results.csv"
BEGIN, END = "<!-- dynamic context parallelism: make docs -->\n", "<!-- end of dynamic context parallelism -->\n"
COLUMNS = {
    "default_dynamic_cp": "Megatron's dynamic groups over `dp_balanced`",
    "measured by NVIDIA": "the same, measured by NVIDIA",
    "ours": "ours over `dp_balanced`",
    "ours over default_dynamic_cp": "ours over Megatron's",
    "ours over default_dynamic_cp, worst step": "worst step",
    "steps that take Megatron's answer": "steps that take Megatron's answer",
}
"""Metrics of the rows, and headings."""


def comparison() -> str:
    """Markdown lines: a table, and where its rows are from."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["benchmark"] == "dynamic_cp":
                found.setdefault(row["case"].split(",")[0], {})[row["metric"]] = row  # the last of equals
    lines = [f"| GPUs | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for case, rows in found.items():
        lines.append(f"| {case.removesuffix(' GPUs')} | {' | '.join(_cell(rows[metric]) for metric in COLUMNS)} |")
    commits = sorted({row["commit"] for rows in found.values() for row in rows.values()})
    return "\n".join([*lines, "", f"`python benchmarks/dynamic_cp.py`, commit `{'`, `'.join(commits)}`.", ""])


def _cell(row: dict[str, str]) -> str:
    value = float(row["value"])
    return f"{value:.0f} %" if row["unit"] == "%" else f"{value:.3f}×"


def page_with_comparison() -> str:
    """The page with the block replaced."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + comparison() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with_comparison(), encoding="utf-8")
