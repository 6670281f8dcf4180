"""Rows of measurements: one CSV that only grows, so that every published figure has its row and its command.

A row names what was compared with what. Ratios and medians, never a lone absolute time: absolute times of
another machine mean nothing, and on this one they drift with the load.
"""

import argparse
import csv
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results" / "results.csv"
COLUMNS = (
    "date", "commit", "cpu", "cores", "torch", "benchmark", "case", "metric", "value", "unit", "baseline",
)  # fmt: skip


class Row(NamedTuple):
    """One measured figure.

    Args:
        case: the input, in words.
        unit: "x" for ratios.
        baseline: what the value is relative to, measured in the same run; "" where the value is a share of itself.
    """

    benchmark: str
    case: str
    metric: str
    value: float
    unit: str
    baseline: str


def append_rows(rows: Sequence[Row], path: Path = RESULTS, torch: str | None = None) -> None:
    """Append rows with date, commit and machine; writes the header of a new file.

    Args:
        torch: the version that was measured, where it is not the one installed here; "" for none.
    """
    used = version("torch") if torch is None else torch
    facts = (time.strftime("%Y-%m-%d"), commit_name(), cpu_name(), str(os.cpu_count()), used)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerows((*facts, *row._replace(value=f"{row.value:.6g}")) for row in rows)  # type: ignore[arg-type]


def commit_name() -> str:
    """Short hash of the checked-out commit, with "+changes" where files differ from it."""
    here = Path(__file__).parent
    name = subprocess.run(
        ["git", "rev-parse", "--short=10", "HEAD"], cwd=here, capture_output=True, text=True, check=True
    )
    changes = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/native", ":/benchmarks/*.py"],
        cwd=here, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return name.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def cpu_name() -> str:
    """The CPU's model name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def interleaved_seconds(variants: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every variant, run in turn `repeats` times after one round that does not count.

    Taking turns lets slow drifts of the machine meet all variants alike; form ratios within a round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, work in variants.items():
            start_s = time.perf_counter()
            work()
            if repeat:
                seconds[name].append(time.perf_counter() - start_s)
    return seconds


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Median over rounds of one variant's time over another's."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def run_benchmark(measure: Callable[[bool], list[Row]], description: str, arguments: list[str] | None = None) -> None:
    """Command line of one benchmark: measure, print, and append when asked."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few repeats and small inputs: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{RESULTS.name}")
    options = parser.parse_args(arguments)
    if options.quick and options.append:
        sys.exit("--quick results are noise; measure without --quick to append")
    rows = measure(options.quick)
    for row in rows:
        print(f"{row.benchmark:<9} {row.case:<72} {row.metric:<19} {row.value:>9.4g} {row.unit:<5} {row.baseline}")
    if options.append:
        append_rows(rows)
