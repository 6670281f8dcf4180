"""Commands that measure on this machine, by processes of `cli.measure_worker`: `evenload bench` (strategies against
each other), `check` (proves what training promises) and `profile` (layers and links, for a cost file)."""

import sys
import time
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from evenload.bench.results import BenchResult
from evenload.cli import launch
from evenload.cli.options import (
    COUNTS,
    ConfigOptions,
    argument,
    calibration_cache,
    command_of,
    indented_json,
    option,
    parse_tokens,
    print_lines,
    require_writable,
    write_output,
)
from evenload.cli.plan_inputs import measured_message
from evenload.cli.plan_request import parse_strategies
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError, require_train_extra
from evenload.report.table import add_strategy, bare_table
from evenload.types.text import counted, format_change, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from evenload.check.smaller_run import Verdict

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


_STYLES = {"pass": "bold green", "fail": "bold red", "skipped": "yellow"}


@dataclass(frozen=True, kw_only=True)
class CheckRequest(ConfigOptions):
    """What `evenload check` is to prove: of a run, or of packing a model in any trainer."""

    config: Path | None = argument("CONFIG.toml", "Settings of a run of `evenload train`.", default=None)  # type: ignore[bad-override]
    model: str | None = option(
        None,
        "In place of CONFIG.toml: built-in name, HF config.json or its folder; nothing is downloaded for a folder.",
    )
    attention: str = option(None, "With --model: attn_implementation of transformers on a CPU.", default="sdpa")


def run_check(request: CheckRequest) -> None:
    """Prove on your model and data: isolation, invariance, resume, ledger, memory.

    Takes a minute. Starts the processes of \\[parallel] on this machine, runs a few small steps of the model (its first
    layers where it is large) on the first documents, reads and plans batches as training would, and writes nothing.

        evenload check --model config.json

    tells instead which ways of packing documents leak, for any trainer: by a small copy of the model, in seconds.

    Exit code: 0 all passed or skipped, 1 a check failed, 3 only memory failed, 2 wrong input.
    """
    require_train_extra("evenload check")
    launch.require_own_launch("evenload check")
    started_s = time.perf_counter()
    if (request.model is None) == (request.config is None):
        raise ConfigError("evenload check takes either a CONFIG.toml or --model; give one")
    if request.model is not None:
        import torch

        from evenload.check.packing import check_packing
        from evenload.runtime.model.model_config import read_config

        # Products are tiny, and threads would wait for each other.
        torch.set_num_threads(1)
        answer, verdicts = check_packing(read_config(request.model), request.attention)
        print_lines(Console(), answer)
    else:
        content = launch.measure("evenload check", "check", request.load(), calibration_cache())
        from evenload.check.smaller_run import Verdict

        verdicts = msgspec.json.decode(content, type=list[Verdict])
    _show_verdicts(verdicts, started_s)


def _show_verdicts(verdicts: "list[Verdict]", started_s: float) -> NoReturn:
    from evenload.check.smaller_run import exit_code

    table = bare_table("", "check", "verdict", left=("verdict",))
    table.add_column("what was found")
    for verdict in verdicts:
        text = Text(verdict.found)
        if verdict.why:
            text.append("\n" if verdict.found else "")
            text.append(verdict.why, style=_STYLES[verdict.outcome])
        table.add_row(verdict.name, Text(verdict.outcome, style=_STYLES[verdict.outcome]), text)
    console = Console(highlight=False)
    console.print(table)
    failed = [verdict.name for verdict in verdicts if verdict.outcome == "fail"]
    found = f"failed: {', '.join(failed)}" if failed else "nothing failed"
    console.print(f"{found} ({time.perf_counter() - started_s:.0f} s)")
    sys.exit(exit_code(verdicts))


check_command = command_of(CheckRequest, run_check)
_LEAST_LONGEST = 1024
"""Below, no pack has a prefix, and its price cannot be measured."""


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What `evenload profile` is to measure."""

    model: str = option(
        None, "Built-in name (llama3-8b, qwen3-8b, ...), an HF config.json or the folder it lies in.", default=MISSING
    )
    output: Path = option(None, "The cost file to write.", "--output", "-o", metavar="COST.json", default=MISSING)
    layout: str = option(
        None, "For example dp=2,pp=2: so many processes, whose links are measured. Default: one.", default=""
    )
    device: Literal["cpu", "cuda"] = option(None, "What computes.", default="cpu")
    dtype: Literal["float32", "bfloat16", "float64"] | None = option(
        None, "Precision of the run that is planned for; default float32 on cpu, bfloat16 on cuda."
    )
    attention: str = option(None, "Backend, as train.attention.", default="auto")
    minutes: float = option(None, "At most about so many.", default=5.0)
    context: str = option(None, f"Longest document that is tried. {COUNTS}", metavar="TOKENS", default="32k")
    threads: int | None = option(None, "Of a process, as train.threads_per_process; default: cores / processes.", min=1)

    @property
    def precision(self) -> Literal["float32", "bfloat16", "float64"]:
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def longest(self) -> int:
        return parse_tokens("--context", self.context)


def run_profile(request: ProfileRequest) -> None:
    """Measure what a model's packs and transfers cost on this machine, so that plans predict its seconds.

    Times a few layers of the model with random weights (matrix products, attention, head, optimizer), the links between
    the processes of --layout, alone and during attention, and counts the bytes that tokens leave. Everything is timed
    in turn, again and again, until the minutes are over.

        evenload profile --model qwen2.5-0.5b --layout pp=2 -o cost.json

    Then `evenload plan ... --layout pp=2 --cost cost.json`, or train.cost_file = "cost.json" in a run's config.toml.

    The file says what it was measured on, and how far predictions were off on packs that the fit had not seen.
    """
    require_train_extra("evenload profile")
    if not request.minutes > 0:
        raise ConfigError(f"--minutes is {request.minutes:g}, must be above 0")
    if request.longest < _LEAST_LONGEST:
        raise ConfigError(
            f"--context is {request.longest} tokens, must be at least {_LEAST_LONGEST}: what prefixes cost shows only "
            "in packs that have one"
        )
    require_writable(request.output)
    content = launch.measure("evenload profile", "profile", request)
    if not content:  # on other ranks than 0
        return
    costs = msgspec.json.decode(content, type=CostCoefficients)
    new = request.output.with_name(f"{request.output.name}.new")
    write_output(new, indented_json(costs))
    new.replace(request.output)
    typer.echo(f"{request.output}: {measured_message(costs)}")


profile_command = command_of(ProfileRequest, run_profile)
