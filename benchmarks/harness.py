"""What all benchmarks share: variants that take turns, medians, rows with the facts of the machine, the command line.

A benchmark is a script with `PARTS`, functions that yield rows. A row compares: its value is a ratio or a share of
something measured in the same run, because an absolute time says nothing on another machine, and on the same one it
drifts with the load. The exceptions are times to plan and rates of the core, which stand beside a baseline's.

    python benchmarks/NAME.py            prints rows
    python benchmarks/NAME.py --quick    few repeats and small inputs: does it work at all?
    python benchmarks/NAME.py --append   adds the rows to benchmarks/results/NAME.csv, each when it is measured
"""

import argparse
import csv
import functools
import inspect
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Row(NamedTuple):
    """One figure.

    Args:
        benchmark: the group of rows inside a script's file.
        case: the input, in words.
        unit: "x" for ratios.
        baseline: what the value is relative to, from the same run; "" where the value is a share of itself.
        spread: the largest over the smallest repeat; 1 where there was one.
    """

    benchmark: str
    case: str
    metric: str
    value: float
    unit: str = "x"
    baseline: str = ""
    spread: float = 1.0


Part = Callable[[bool], Iterable[Row]]
"""Yields rows; called with whether to be quick."""
FACTS = ("date", "commit", "cpu", "cores", "torch", "load")


def machine_facts(torch: str | None = None) -> dict[str, str]:
    """When, at which commit and on what a row was measured.

    Args:
        torch: the version that was measured, where it is not the one installed here.
    """
    load = f"{os.getloadavg()[0]:.1f}"  # far above the cores that a benchmark uses, others ran at the same time
    day, cores = time.strftime("%Y-%m-%d"), str(os.cpu_count())
    return dict(zip(FACTS, (day, commit_name(), cpu_name(), cores, torch or version("torch"), load), strict=True))


@functools.cache
def commit_name() -> str:
    """Short hash of the checked-out commit, with "+changes" where files differ from it; in a copy without a repository
    what `make wheels` wrote down, else "unknown"."""
    # A repository around the copy is another one.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    ask = functools.partial(subprocess.check_output, cwd=ROOT, env=environment, text=True, stderr=subprocess.DEVNULL)
    sources = (":/src", ":/native", ":/benchmarks/*.py")
    try:
        name = ask(["git", "rev-parse", "--short=10", "HEAD"]).strip()
        changes = ask(["git", "status", "--porcelain", "--untracked-files=no", "--", *sources])
    except (OSError, subprocess.CalledProcessError):
        noted = ROOT / "wheels" / "commit.txt"
        return noted.read_text().strip() if noted.is_file() else "unknown"
    return name + ("+changes" if changes else "")


def cpu_name() -> str:
    """The CPU's model name where the system has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def append_row(path: Path, row: Row) -> None:
    """Append a row with the facts of this machine; writes the header of a new file."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = machine_facts() | row._asdict() | {"value": f"{row.value:.6g}", "spread": f"{row.spread:.3g}"}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, cells, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(cells)


def alternate(
    variants: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every variant, run in turn `repeats` times after one round that does not count.

    Taking turns lets slow drifts of the machine meet all variants alike; form ratios within a round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, work in variants.items():
            start_s = clock()
            work()
            if repeat:
                seconds[name].append(clock() - start_s)
    return seconds


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of one variant's time over another's."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Median, and the largest over the smallest."""
    return statistics.median(values), max(values) / min(values)


def ratio_row(
    benchmark: str, case: str, metric: str, above: Sequence[float], below: Sequence[float], baseline: str
) -> Row:
    """A ratio formed within each round of alternating repeats, with its spread."""
    value, spread = median_and_spread([a / b for a, b in zip(above, below, strict=True)])
    return Row(benchmark, case, metric, value, "x", baseline, spread)


def run(parts: Mapping[str, Part], arguments: Sequence[str] | None = None, keep: Path | None = None) -> None:
    """Command line of the benchmark that calls this: measure all parts or one, print, and append when asked.

    Args:
        parts: by name; `--part` picks one.
        arguments: of the command line; None = `sys.argv`.
        keep: the file of the rows; None = that of the calling script.
    """
    caller = inspect.stack()[1]
    path = keep or RESULTS / Path(caller.filename).with_suffix(".csv").name
    parser = argparse.ArgumentParser(
        description=caller.frame.f_globals.get("__doc__"), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few repeats and small inputs: does it work at all?")
    parser.add_argument("--append", action="store_true", help=f"append the rows to benchmarks/results/{path.name}")
    parser.add_argument("--part", choices=list(parts), help="this part only")
    options = parser.parse_args(arguments)
    if options.quick and options.append:
        sys.exit("--quick results are noise; measure without --quick to append")
    for name, measure in parts.items():
        if options.part in (None, name):
            print_and_keep(measure(options.quick), path if options.append else None)


def print_and_keep(rows: Iterable[Row], path: Path | None) -> None:
    """Print every row when it is there, and append it to the file: all of a benchmark may take hours, or a machine end
    before it does."""
    for row in rows:
        against = f"against {row.baseline}" if row.baseline else ""
        value = f"{row.value:>10.4g} {row.unit:<6} {against}"
        print(f"{row.benchmark:<14} {row.case:<72} {row.metric:<26} {value}", flush=True)
        if path is not None:
            append_row(path, row)
