"""The tables of docs/engines.md, from their rows: plans for Megatron's dynamic context parallelism, and steps measured
on the engines.

python tools/make_engines.py      part of `make docs`; a test fails when page and rows differ

Rows are the newest of `dynamic_cp` and `engine_steps` in benchmarks/results/results.csv.
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
STEPS_BEGIN, STEPS_END = "<!-- steps of engines: make docs -->\n", "<!-- end of steps of engines -->\n"
STEPS_COLUMNS = {
    "auto faster": "`auto` over `best_fit`, measured",
    "auto predicted faster": "predicted",
    "balanced faster": "`balanced` over `best_fit`, measured",
    "balanced predicted faster": "predicted",
    "auto predicted over measured": "step of `auto`, predicted over measured",
}


def comparison() -> str:
    """Markdown lines of dynamic context parallelism: a table, and where its rows are from."""
    found = newest_rows("dynamic_cp")
    titles = {case: case.removesuffix(" GPUs") for case in found}
    return _table("GPUs", COLUMNS, found, titles, "dynamic_cp.py")


def steps() -> str:
    """The same of steps on the engines; a line where nothing was measured."""
    found = newest_rows("engine_steps")
    if not found:
        return "No rows yet: `python benchmarks/engine_steps.py --append`.\n"
    return _table("engine", STEPS_COLUMNS, found, {name: f"`{name}`" for name in found}, "engine_steps.py")


def newest_rows(benchmark: str) -> dict[str, dict[str, dict[str, str]]]:
    """By the first words of the case, then by metric."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    with RESULTS.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["benchmark"] == benchmark:
                found.setdefault(row["case"].split(",")[0], {})[row["metric"]] = row  # the last of equals
    return found


def _table(
    first: str,
    columns: dict[str, str],
    found: dict[str, dict[str, dict[str, str]]],
    titles: dict[str, str],
    script: str,
) -> str:
    lines = [f"| {first} | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1) + "|"]
    for case, rows in found.items():
        lines.append(f"| {titles[case]} | {' | '.join(_cell(rows[metric]) for metric in columns)} |")
    commits = sorted({row["commit"] for rows in found.values() for row in rows.values()})
    return "\n".join([*lines, "", f"`python benchmarks/{script}`, commit `{'`, `'.join(commits)}`.", ""])


def _cell(row: dict[str, str]) -> str:
    value = float(row["value"])
    return f"{value:.0f} %" if row["unit"] == "%" else f"{value:.3f}×"


def page_with_comparison() -> str:
    """The page with both blocks replaced."""
    page = PAGE.read_text(encoding="utf-8")
    for begin, end, block in ((BEGIN, END, comparison()), (STEPS_BEGIN, STEPS_END, steps())):
        before, rest = page.split(begin)
        page = before + begin + block + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_comparison(), encoding="utf-8")
