"""docs/planner.md's time to plan, from the newest rows of benchmarks/results.

python tools/make_planning_times.py      part of `make docs`; a test fails when page and rows differ

Rows of planning_growth.csv, of lognormal lengths, and of `planning_memory` in results.csv, with and without a memory
limit, as ranges over tables of lengths.
"""

import csv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- planning times: make docs -->\n", "<!-- end of planning times -->\n"
STRATEGIES = ("slimpack", "auto")


def planning_times() -> str:
    """Markdown lines: a table, and the machine under it."""
    growth = _newest("planning_growth.csv", "growth")
    # A strategy that got too slow was not asked for more documents: a row of an older commit says nothing of it.
    commit = list(growth.values())[-1]["commit"]
    growth = {case: row for case, row in growth.items() if row["commit"] == commit}
    counts = list(dict.fromkeys(case.split(", ", 1)[1] for case in growth if case.startswith("slimpack, ")))
    lines = ["| documents | memory | lengths | `slimpack` | `auto` |", "|---|---|---|---|---|"]
    for count in counts:
        cells = " | ".join(_ms(growth.get(f"{strategy}, {count}")) for strategy in STRATEGIES)
        lines.append(f"| {count.split(' documents')[0]} | 80 GB, policies chosen | lognormal, 32K | {cells} |")
    used = [row for case, row in growth.items() if case.startswith(STRATEGIES)]
    binding = _newest("results.csv", "planning_memory")
    kinds = dict.fromkeys(_kind(case) for case in binding)
    for memory, count in kinds:
        ranges = []
        for strategy in STRATEGIES:
            rows = [
                row for case, row in binding.items() if case.startswith(strategy) and _kind(case) == (memory, count)
            ]
            values = sorted(float(row["value"]) for row in rows)
            ranges.append(f"{values[0]:,.0f}-{values[-1]:,.0f} ms")
            used += rows
        limit = "no limit" if memory == "unlimited" else f"{memory}, policies chosen"
        lines.append(f"| {count} | {limit} | four tables, 32K and 128K | {' | '.join(ranges)} |")
    facts = sorted({f"{row['cores']} cores of {row['cpu']}, commit `{row['commit']}`" for row in used})
    return "\n".join([*lines, "", f"Medians; {'; '.join(facts)}.", ""])


def _kind(case: str) -> tuple[str, str]:
    """Memory and documents of a case such as "auto, 80 GB, books, 32K, 2,048 documents"."""
    parts = case.removesuffix(" documents").split(", ")
    return parts[1], parts[4]


def _ms(row: dict[str, str] | None) -> str:
    if row is None:
        return "not tried"
    return f"{float(row['value']):,.3g} ms" if float(row["value"]) < 1000 else f"{float(row['value']) / 1000:.2g} s"


def _newest(file: str, benchmark: str) -> dict[str, dict[str, str]]:
    """By case the last row of a benchmark's "plan and choose", in the order of the rows."""
    found: dict[str, dict[str, str]] = {}
    with (RESULTS / file).open(newline="") as rows:
        for row in csv.DictReader(rows):
            if (row["benchmark"], row["metric"]) == (benchmark, "plan and choose"):
                found.pop(row["case"], None)
                found[row["case"]] = row
    return found


def page_with_times() -> str:
    """The page with the block replaced."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return before + BEGIN + planning_times() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with_times(), encoding="utf-8")
