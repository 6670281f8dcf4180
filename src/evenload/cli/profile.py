"""`evenload profile`: minutes spent on measuring a model's layers and links on this machine, for a cost file."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from evenload.cli.options import COUNTS, parse_tokens, require_writable, write_output
from evenload.cli.plan_inputs import measured_line
from evenload.cost.coefficients import CostCoefficients, encode_coefficients, read_coefficients
from evenload.errors import ConfigError, needs_train_extra, require_train_extra

if TYPE_CHECKING:
    from evenload.cli.profile_worker import ProfileOptions
    from evenload.types.layout import ParallelLayout

_LEAST_LONGEST = 1024
"""Below, no pack has a prefix, and its price cannot be told."""


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
    from evenload.cli.launch import call_in_child, run_local, start_fork_server

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
    given = {
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
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _run_under_torchrun(given, output)
        return
    start_fork_server("evenload.cli.profile_worker")
    with tempfile.TemporaryDirectory(prefix="evenload-profile-") as directory:
        with needs_train_extra("evenload profile"):
            import torch.distributed.launcher.api  # noqa: F401  # while the server imports the rest

            options, parallel = call_in_child(_checked, given)
        answer = Path(directory) / "cost.json"
        run_local(_run_rank, (options, answer), parallel.world_size)
        _finish(read_coefficients(answer), output)


def _run_under_torchrun(given: dict, output: Path) -> None:
    """All ranks are there already, of which this process is one."""
    with needs_train_extra("evenload profile"):
        from evenload.cli.profile_worker import ProfileOptions, checked_profile, run_profile_worker

    options = ProfileOptions(**given)
    checked_profile(options, int(os.environ["LOCAL_WORLD_SIZE"]))
    with tempfile.TemporaryDirectory(prefix="evenload-profile-") as directory:
        answer = Path(directory) / "cost.json"
        run_profile_worker(options, answer)
        if answer.is_file():  # rank 0
            _finish(read_coefficients(answer), output)


def _finish(found: CostCoefficients, output: Path) -> None:
    from evenload.calibrate.profile import partial_path

    new = output.with_name(f"{output.name}.new")
    write_output(new, encode_coefficients(found))
    new.replace(output)
    partial_path(output).unlink(missing_ok=True)
    typer.echo(f"{output}: {measured_line(found)}")


# Named here, so that the launcher itself need not import what its children have imported.


def _checked(given: dict) -> "tuple[ProfileOptions, ParallelLayout]":
    from evenload.cli.profile_worker import ProfileOptions, checked_profile

    options = ProfileOptions(**given)
    return options, checked_profile(options, None)


def _run_rank(options: "ProfileOptions", answer: Path) -> int:
    from evenload.cli.profile_worker import run_profile_worker

    return run_profile_worker(options, answer)
