"""Write the tables of docs/engines.md from their rows: steps measured on the engines, and what engines are predicted to
cost.

python tools/make_engines.py      part of `make docs`; a test fails when page and rows differ

Rows are the newest of `engine_steps` and `engine_prices` in benchmarks/results/results.csv.
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "engines.md"
RESULTS = ROOT / "benchmarks" / "results" / "results.csv"
STEPS_BEGIN, STEPS_END = "<!-- steps of engines: make docs -->\n", "<!-- end of steps of engines -->\n"
STEPS_COLUMNS = {
    "auto faster": "`auto` over it, measured",
    "auto faster, lower quartile": "lower quartile",
    "auto faster, upper quartile": "upper quartile",
    "auto predicted faster": "predicted",
    "auto predicted over measured": "step of `auto`, predicted over measured",
}
PRICES_BEGIN, PRICES_END = "<!-- prices of engines: make docs -->\n", "<!-- end of prices of engines -->\n"


def steps() -> str:
    """Return the Markdown table of steps on the engines; a line where nothing was measured."""
    found = newest_rows("engine_steps")
    if not found:
        return "No rows yet: `python benchmarks/engine_steps.py --append`.\n"
    titles = {name: f"`{name}` | `{rows['auto faster']['baseline']}`" for name, rows in found.items()}
    return _table("engine | what its users get", STEPS_COLUMNS, found, titles, "engine_steps.py")


def prices() -> str:
    """What engines cost beside Evenload's runtime, predicted: a row an engine, two columns a table of lengths."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    columns: dict[str, str] = {}
    layouts: dict[str, str] = {}
    for row in _rows("engine_prices"):
        engine, table, _, layout = row["case"].split(", ")[:4]
        layouts[engine] = layout
        column = f"{table}, {row['metric']}"
        columns[column] = f"{table}: `{row['metric']}`"
        found.setdefault(engine, {})[column] = row
    titles = {engine: f"`{engine}` | {layouts[engine]}" for engine in found}
    return _table("engine | layout", columns, found, titles, "engine_prices.py")


def _rows(benchmark: str) -> list[dict[str, str]]:
    with RESULTS.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["benchmark"] == benchmark]


def newest_rows(benchmark: str) -> dict[str, dict[str, dict[str, str]]]:
    """By the first words of the case, then by metric."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in _rows(benchmark):
        found.setdefault(row["case"].split(",")[0], {})[row["metric"]] = row  # the last of equals
    return found


def _table(
    first: str,
    columns: dict[str, str],
    found: dict[str, dict[str, dict[str, str]]],
    titles: dict[str, str],
    script: str,
) -> str:
    lines = [f"| {first} | {' | '.join(columns.values())} |", "|---" * (len(columns) + 1 + first.count("|")) + "|"]
    for case, rows in found.items():
        lines.append(f"| {titles[case]} | {' | '.join(_cell(rows[metric]) for metric in columns)} |")
    commits = sorted({row["commit"] for rows in found.values() for row in rows.values()})
    return "\n".join([*lines, "", f"`python benchmarks/{script}`, commit `{'`, `'.join(commits)}`.", ""])


def _cell(row: dict[str, str]) -> str:
    value = float(row["value"])
    return f"{value:.0f} %" if row["unit"] == "%" else f"{value:.3f}×"


def page_with_comparison() -> str:
    """The page with all blocks replaced."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = (STEPS_BEGIN, STEPS_END, steps()), (PRICES_BEGIN, PRICES_END, prices())
    for begin, end, block in blocks:
        before, rest = page.split(begin)
        page = before + begin + block + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(page_with_comparison(), encoding="utf-8")
