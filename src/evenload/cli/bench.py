"""`evenload bench`: strategies measured against each other on the user's machine, model and data."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from evenload.bench.results import BenchResult
from evenload.cli import launch
from evenload.cli.options import (
    ConfigOptions,
    calibration_cache,
    command_of,
    indented_json,
    option,
    print_lines,
    require_writable,
    write_output,
)
from evenload.cli.plan_request import parse_strategies
from evenload.errors import require_train_extra
from evenload.report.table import add_strategy, bare_table
from evenload.report.units import format_change, format_count, format_percent, format_seconds
from evenload.types.text import counted

# ruff: noqa: RUF009  (`option` makes a field, whose default is no call)
_HEADINGS = ("strategy", "step\ntime", "spread", "pre-\ndicted", "error", "pack\nerror", "memory\nerror", "tokens\n/s")


@dataclass(frozen=True, kw_only=True)
class BenchRequest(ConfigOptions):
    """What `evenload bench` is to measure."""

    strategy: str = option(
        None, "Names with commas, or 'all' that train; default: best_fit and the configured strategy.", default=""
    )
    steps: int = option(None, "Global batches, the same for every strategy.", min=1, default=3)
    rounds: int = option(None, "How often each is measured, after once to warm up.", min=1, default=5)
    json_path: Path | None = option(None, "Write the result as JSON.", "--json")
    html_path: Path | None = option(None, "Write a page: every step as predicted and as measured.", "--html")


def run_bench(request: BenchRequest) -> None:
    """Measure strategies against each other on your machine, model and data, beside their predictions.

    Starts the processes of \\[parallel] on this machine and runs the same global batches under each strategy,
    interleaved step by step, so that a busy neighbour slows all of them alike. Nothing is trained: updates are computed
    with learning rate 0, so the losses of all strategies must agree. Writes nothing but --json and
    --html.

        evenload bench config.toml --strategy best_fit,slimpack,auto

    Spread: what rounds differ by, slowest to fastest. Errors are predicted / measured - 1: of the step time, of packs
    the median of absolute values, of the peak memory the largest.
    """
    require_train_extra("evenload bench")
    launch.require_own_launch("evenload bench")
    started_s = time.perf_counter()
    config = request.load()
    names = parse_strategies(request.strategy or f"best_fit,{config.plan.strategy}")
    require_writable(request.json_path, request.html_path)
    content = launch.measure("evenload bench", "bench", request, config, names, calibration_cache())
    if request.json_path is not None:
        write_output(request.json_path, indented_json(msgspec.Raw(content)))
    show_result(msgspec.json.decode(content, type=BenchResult), time.perf_counter() - started_s)


bench_command = command_of(BenchRequest, run_bench)


def show_result(result: BenchResult, seconds: float) -> None:
    table = bare_table("", *_HEADINGS, is_narrow=True)
    for one in result.runs:
        packs = sorted(run.packs.median_abs for run in one.batches)
        cells = (
            format_seconds(one.measured_s),
            format_percent(one.spread),
            format_seconds(one.predicted_s),
            format_change(one.error),
            format_percent(packs[len(packs) // 2]),
            format_change(max((run.memory_error for run in one.batches), key=abs)),
            format_count(one.tokens_per_s),
        )
        add_strategy(table, one.strategy, result.winner, cells)
    console = Console(highlight=False)
    # A cut number is a wrong number: what is wider than the terminal wraps there.
    width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(highlight=False, width=max(console.width, width)).print(table)
    print_lines(console, *_messages(result))
    print_lines(console, *(f"{left.name}: not measured: {left.why}" for left in result.left_out))
    console.print(f"({seconds:.0f} s)")


def _messages(result: BenchResult) -> Iterator[str]:
    runs, batches = result.runs, result.runs[0].batches
    yield (
        f"means of {counted(len(batches), 'global batch')} "
        f"({counted(sum(run.documents for run in batches), 'document')}, "
        f"{sum(run.tokens for run in batches):,} tokens), medians of {counted(len(batches[0].measured_s), 'round')}"
    )
    for one in result.ratios:
        yield f"measured: {one.describe()}"
        yield f"{one.by_round}; predicted {one.predicted:.2f}: {one.verdict}"
    interval, held = result.compare_with_interval()
    yield interval.describe() + (f"; here {held}" if held else "")
    if len(runs) > 1:
        yield f"losses of the strategies differ by at most {result.loss_difference:.1e} (relative)"
