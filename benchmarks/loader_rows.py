"""Rows of the loader's benchmarks: as `results.Row`, with the spread over repeats and the load of the machine.

A figure is a median over repeats, and its spread the largest over the smallest of them. The load is that of the last
minute when the rows are written: far above the cores that the benchmark uses, others ran beside it.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from results import commit_name, cpu_name

RESULTS = Path(__file__).parent / "results" / "loader.csv"
FACTS = ("date", "commit", "cpu", "cores", "torch", "load")


class LoaderRow(NamedTuple):
    """One measured figure.

    Args:
        case: the input, in words.
        unit: "x" for ratios.
        spread: largest over smallest repeat; 1 where there was one.
        baseline: what the value is relative to, measured in the same run; "" where it stands for itself.
    """

    benchmark: str
    case: str
    metric: str
    value: float
    unit: str
    spread: float = 1.0
    baseline: str = ""


Measure = Callable[[bool], list[LoaderRow]]


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and largest over smallest."""
    return statistics.median(values), max(values) / min(values)


def ratio_row(
    benchmark: str, case: str, metric: str, above: Sequence[float], below: Sequence[float], baseline: str
) -> LoaderRow:
    """A ratio formed within each round of interleaved repeats."""
    value, spread = median_and_spread([a / b for a, b in zip(above, below, strict=True)])
    return LoaderRow(benchmark, case, metric, value, "x", spread, baseline)


def append_rows(rows: Sequence[LoaderRow]) -> None:
    """Append rows with date, commit, machine and load; writes the header of a new file."""
    load = f"{os.getloadavg()[0]:.1f}"
    facts = (time.strftime("%Y-%m-%d"), commit_name(), cpu_name(), str(os.cpu_count()), version("torch"), load)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow((*FACTS, *LoaderRow._fields))
        for row in rows:
            rounded = row._replace(value=f"{row.value:.6g}", spread=f"{row.spread:.3g}")  # type: ignore[arg-type]
            writer.writerow((*facts, *rounded))


def run_benchmark(parts: dict[str, Measure], description: str, arguments: Sequence[str] | None = None) -> None:
    """Command line of one benchmark: measure all parts or one, print, and append when asked.

    Args:
        parts: by name; `--part` picks one.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few repeats and small inputs: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    parser.add_argument("--part", choices=list(parts), help="measure this part only")
    options = parser.parse_args(arguments)
    if options.quick and options.append:
        sys.exit("--quick results are noise; measure without --quick to append")
    for name, measure in parts.items():
        if options.part not in (None, name):
            continue
        rows = measure(options.quick)
        for row in rows:
            against = f"against {row.baseline}" if row.baseline else ""
            print(
                f"{row.benchmark:<9} {row.case:<66} {row.metric:<26} {row.value:>9.4g} {row.unit:<12} "
                f"spread {row.spread:<5.3g} {against}",
                flush=True,
            )
        if options.append:
            append_rows(rows)
