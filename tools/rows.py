"""Rows of benchmarks/results, the newest of each, and Markdown tables of them: what `make_tables.py` and
`paper_tables.py` share."""

import csv
import statistics
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, str]


class Rows(list[Row]):
    """Rows of a script or some of them."""

    def value(self, metric: str, baseline: str | None = None) -> float | None:
        """Of the last row of a metric; None where there is none."""
        result = [row for row in self if row["metric"] == metric and baseline in (None, row["baseline"])]
        return float(result[-1]["value"]) if result else None

    def some(self, **columns: str) -> "Rows":
        """Rows whose columns have these values."""
        return Rows(row for row in self if all(row[name] == value for name, value in columns.items()))

    def by_case(self) -> dict[str, "Rows"]:
        """Rows of each case, in order."""
        return {case: self.some(case=case) for case in dict.fromkeys(row["case"] for row in self)}

    def values(self, metric: str) -> list[float]:
        """Of all cases, sorted."""
        return sorted(float(row["value"]) for row in self if row["metric"] == metric)


def read(script: str) -> list[Row]:
    """All rows of a file, oldest first."""
    with (RESULTS / f"{script}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def newest(script: str, benchmark: str | None = None) -> Rows:
    """The last row of every case, metric and baseline."""
    rows = {(row["benchmark"], row["case"], row["metric"], row["baseline"]): row for row in read(script)}
    return Rows(row for row in rows.values() if benchmark in (None, row["benchmark"]))


def table(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    heads = list(heads)
    cells = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def source(rows: Rows, script: str) -> str:
    """The command and where its rows are from."""
    places = dict.fromkeys(f"commit `{row['commit']}`, {row['cores']} cores of {row['cpu']}" for row in rows)
    return f"\n[`python benchmarks/{script}.py --append`](../benchmarks/{script}.py): {'; '.join(places)}.\n"


def percent(value: float | None) -> str:
    """One place; nothing where there is no value."""
    return "" if value is None else f"{value:.1%}"


def times(value: float | None, places: int = 2) -> str:
    """A ratio."""
    return "" if value is None else f"{value:.{places}f}"


def geometric(values: list[float]) -> str:
    """A geometric mean."""
    return f"{statistics.geometric_mean(values):.3f}" if values else ""
