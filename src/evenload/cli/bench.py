"""`evenload bench`: strategies measured against each other on the user's machine, model and data."""

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenload.bench.runs import BenchResult
from evenload.cli.options import calibration_cache, require_writable, write_output
from evenload.errors import needs_train_extra, require_train_extra
from evenload.types.text import counted

if TYPE_CHECKING:
    from evenload.cli.bench_worker import BenchPlan
    from evenload.config.train_config import TrainConfig
    from evenload.types.layout import ParallelLayout


def bench_command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Settings of a run of `evenload train`.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[section.key=value]...", help="Replace settings, for example parallel.pp=2."),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(help="Names with commas, or 'all' that train; default: best_fit and the configured strategy."),
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Global batches, the same for every strategy.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is measured, after once to warm up.")] = 5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result as JSON.")] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write a page: every step as predicted beside as measured.")
    ] = None,
) -> None:
    """Measure strategies against each other on your machine, model and data, beside their predictions.

    Starts the processes of \\[parallel] on this machine and runs the same global batches under each strategy,
    interleaved step by step, so that a busy neighbour slows all of them alike. Nothing is trained: updates are computed
    with learning rate 0, so the losses of all strategies must agree. Writes nothing but --json and
    --html.

        evenload bench config.toml --strategy best_fit,slimpack,auto

    Spread: what rounds differ by, slowest to fastest. Errors are predicted / measured - 1: of the step time, of packs
    the median of absolute values, of the peak memory the largest.
    """
    from evenload.cli.launch import call_in_child, require_own_launch, run_local, start_fork_server
    from evenload.cli.plan_arguments import asked_strategies
    from evenload.config.train_config import load_train_config

    require_train_extra("evenload bench")
    require_own_launch("evenload bench")
    started_s = time.perf_counter()
    settings = load_train_config(config, overrides or [])
    asked = asked_strategies(strategy or f"best_fit,{settings.plan.strategy}")
    require_writable(json_path, html_path)
    start_fork_server("evenload.cli.bench_worker")
    with tempfile.TemporaryDirectory(prefix="evenload-bench-") as directory:
        import msgspec

        with needs_train_extra("evenload bench"):
            import torch.distributed.launcher.api  # noqa: F401  # while the server imports the rest

            plan, layout = call_in_child(_checked, settings, asked, steps, rounds)
        answer = Path(directory) / "result.json"
        run_local(_run_rank, (settings, plan, calibration_cache(), answer, html_path), layout.world_size)
        content = answer.read_bytes()
        result = msgspec.json.decode(content, type=BenchResult)
    if json_path is not None:
        write_output(json_path, msgspec.json.format(content, indent=2) + b"\n")
    show_result(result, time.perf_counter() - started_s)


# Named here, so that the launcher itself need not import what its children have imported.


def _checked(
    config: "TrainConfig", asked: tuple[str, ...] | None, steps: int, rounds: int
) -> "tuple[BenchPlan, ParallelLayout]":
    from evenload.cli.bench_worker import checked_bench

    return checked_bench(config, asked, steps, rounds)


def _run_rank(config: "TrainConfig", plan: "BenchPlan", cache: Path, answer: Path, page: Path | None) -> int:
    from evenload.cli.bench_worker import run_bench_worker

    return run_bench_worker(config, plan, cache, answer, page)


def show_result(result: BenchResult, seconds: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from evenload.report.units import format_change, format_count, format_percent, format_seconds

    runs = result.runs
    winner = result.winner
    errors = ("error", "pack\nerror", "memory\nerror")
    headings = ("strategy", "step\ntime", "spread", "pre-\ndicted", *errors, "tokens\n/s")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True, justify="left" if heading == "strategy" else "right")
    for one in runs:
        packs = sorted(run.packs.median_abs for run in one.batches)
        memory = max((run.memory_error for run in one.batches), key=abs)
        table.add_row(
            f"{'▶' if one.strategy == winner else ' '} {one.strategy}",
            format_seconds(one.measured_s),
            format_percent(one.spread),
            format_seconds(one.predicted_s),
            format_change(one.error),
            format_percent(packs[len(packs) // 2]),
            format_change(memory),
            format_count(one.tokens_per_s),
            style="bold green" if one.strategy == winner else None,
        )
    console = Console(highlight=False)
    # A cut number is a wrong number: what is wider than the terminal wraps there.
    width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(highlight=False, width=max(console.width, width)).print(table)
    for line in _lines(result):
        console.print(Text(line), soft_wrap=True)
    for left in result.left_out:
        console.print(Text(f"{left.name}: not measured: {left.why}"), soft_wrap=True)
    console.print(f"({seconds:.0f} s)")


def _lines(result: BenchResult) -> list[str]:
    from evenload.report.units import format_percent

    runs, load = result.runs, result.load
    batches, rounds = runs[0].batches, len(runs[0].batches[0].measured_s)
    predicted_s = {one.strategy: one.predicted_s for one in runs}
    lines = [
        f"means of {counted(len(batches), 'global batch')} "
        f"({counted(sum(run.documents for run in batches), 'document')}, "
        f"{sum(run.tokens for run in batches):,} tokens), medians of {counted(rounds, 'round')}",
        *(
            f"measured: {one.describe()}; predicted: {predicted_s[one.one] / predicted_s[one.other]:.2f}"
            for one in result.ratios
        ),
    ]
    interval, held = result.held_to_interval()
    busy = (
        f"not held against it, for this machine was busy while steps were measured: no core for "
        f"{format_percent(load.waited_share)} of the time, rounds differ by "
        f"{format_percent(max(one.spread for one in runs))}"
    )
    lines.append(interval.describe() + (f"; here {held or busy}" if interval.of(1.0) else ""))
    if len(runs) > 1:
        lines.append(f"losses of the strategies differ by at most {result.loss_difference:.1e} (relative)")
    return lines
