"""`evenload profile`: minutes spent on measuring a model's layers and links on this machine, for a cost file."""

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from evenload.cli import launch
from evenload.cli.options import COUNTS, parse_tokens, require_writable, write_output
from evenload.cli.plan_inputs import measured_message
from evenload.cost.coefficients import CostCoefficients, encode_coefficients
from evenload.errors import ConfigError, needs_train_extra, require_train_extra

_LEAST_LONGEST = 1024
"""Below, no pack has a prefix, and its price cannot be measured."""


def profile_command(
    model: Annotated[
        str,
        typer.Option(help="Built-in name (llama3-8b, qwen3-8b, ...), an HF config.json or the folder it lies in."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="COST.json", help="The cost file to write.")],
    layout: Annotated[
        str, typer.Option(help="For example dp=2,pp=2: so many processes, whose links are measured. Default: one.")
    ] = "",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What computes.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float64"] | None,
        typer.Option(help="Precision of the run that is planned for; default float32 on cpu, bfloat16 on cuda."),
    ] = None,
    attention: Annotated[str, typer.Option(help="Backend, as train.attention.")] = "auto",
    minutes: Annotated[float, typer.Option(help="At most about so many, all calls for this file together.")] = 5.0,
    context: Annotated[str, typer.Option(metavar="TOKENS", help=f"Longest document that is tried. {COUNTS}")] = "32k",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of a process, as train.threads_per_process; default: cores / processes.")
    ] = None,
) -> None:
    """Measure what a model's packs and transfers cost on this machine, so that plans predict its seconds.

    Times a few layers of the model with random weights (matrix products, attention, head, optimizer), the links between
    the processes of --layout, alone and beside attention, and counts the bytes that tokens leave. Everything is timed
    in turn, again and again, until the minutes are over; a call that was interrupted goes on where it stopped
    (COST.json.partial).

        evenload profile --model qwen2.5-0.5b --layout pp=2 -o cost.json

    Then `evenload plan ... --layout pp=2 --cost cost.json`, or train.cost_file = "cost.json" in a run's config.toml.

    The file says what it was measured on, and how far predictions were off on packs that the fit had not seen.
    """
    require_train_extra("evenload profile")
    if not minutes > 0:
        raise ConfigError(f"--minutes is {minutes:g}, must be above 0")
    longest = parse_tokens("--context", context)
    if longest < _LEAST_LONGEST:
        raise ConfigError(
            f"--context is {longest} tokens, must be at least {_LEAST_LONGEST}: what prefixes cost shows only in packs "
            "that have one"
        )
    require_writable(output)
    options = {
        "model": model,
        "layout": layout,
        "device": device,
        "dtype": dtype or ("float32" if device == "cpu" else "bfloat16"),
        "attention": attention,
        "minutes": minutes,
        "longest": longest,
        "threads": threads,
        "output": str(output.absolute()),
    }
    if launch.under_torchrun():
        content = _profile_as_rank(options)
    else:
        content = launch.measure("evenload profile", "profile", options)
    if content is None:  # on other ranks than 0
        return
    from evenload.calibrate.profile import partial_path

    costs = msgspec.json.decode(content, type=CostCoefficients)
    new = output.with_name(f"{output.name}.new")
    write_output(new, encode_coefficients(costs))
    new.replace(output)
    partial_path(output).unlink(missing_ok=True)
    typer.echo(f"{output}: {measured_message(costs)}")


def _profile_as_rank(options: dict[str, object]) -> bytes | None:
    """Measure with the ranks that torchrun has started, of which this process is one."""
    with needs_train_extra("evenload profile"):
        from evenload.cli.measure_worker import profile_rank, profile_task

    with tempfile.TemporaryDirectory(prefix="evenload-profile-") as directory:
        answer = Path(directory) / "answer.json"
        task, _ = profile_task(answer, options, int(os.environ["LOCAL_WORLD_SIZE"]))
        profile_rank(task)
        return answer.read_bytes() if answer.is_file() else None
