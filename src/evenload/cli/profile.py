"""`evenload profile`: minutes spent on measuring a model's layers and links on this machine, for a cost file."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import msgspec
import typer

from evenload.cli import launch
from evenload.cli.options import COUNTS, command_of, indented_json, option, parse_tokens, require_writable, write_output
from evenload.cli.plan_inputs import measured_message
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError, require_train_extra

# ruff: noqa: RUF009  (`option` makes a field, whose default is no call)
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
