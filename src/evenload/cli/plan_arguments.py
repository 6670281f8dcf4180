"""`PlanArguments`: what the command line of `evenload plan` says, fields instead of dozens of parameters."""

import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from evenload.cli.length_source import (
    DATA_PANEL,
    SOURCE_HELP,
    IncludeOption,
    OnCorruptOption,
    RecordOption,
    TokenizerOption,
)
from evenload.cli.option_values import COUNTS, parse_tokens
from evenload.cli.plan_strategies import STRATEGY_HELP
from evenload.integrations.catalog import ENGINES
from evenload.types.cluster_catalog import BUILT_IN

DEFAULT_DOCUMENTS = 512
"""Documents of a global batch where nothing says its size."""
DEFAULT_CONTEXT = 131_072
"""Tokens of the longest document trained whole, where nothing says so."""
DEFAULT_SEARCH_S = 300.0
"""Most time for a search over layouts."""
ENGINE_HELP = (
    f"Also predict an engine that trains the plans: {', '.join(ENGINES)}. Strategies that it cannot run are refused, "
    "with the reason (docs/engines.md)."
)
CLUSTER_HELP = (
    f"Built-in name ({', '.join(BUILT_IN)}, then x and how many: h100x32), or a TOML file such as "
    "examples/clusters/two_nodes.toml (explained in docs/guide.md). "
    "Needed, but with a config.toml: then this machine, its GPUs or, on the CPU, what a cost file says of it."
)
_MODEL, _DATA = "Model and cluster", DATA_PANEL
_HOW, _SEARCH, _FILES = "Strategies", "Searches", "Files to write"


@dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Arguments and options; None = not given."""

    lengths: Annotated[str, typer.Argument(metavar="LENGTHS", help=SOURCE_HELP)]
    cluster: Annotated[str | None, typer.Option(help=CLUSTER_HELP, rich_help_panel=_MODEL)] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Built-in name (llama3-8b, qwen3-8b, ...), an HF config.json, or a name on the HF Hub. Needed, but "
            "with a config.toml.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            help="For example dp=4,pp=8. Also virtual=2. Default: the shallowest that fits. Stages get layers by cost.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    documents: Annotated[
        int | None,
        typer.Option(help=f"Documents of a global batch (default {DEFAULT_DOCUMENTS}).", rich_help_panel=_DATA),
    ] = None
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS", help=f"Tokens of a global batch, instead of --documents. {COUNTS}", rich_help_panel=_DATA
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help=f"Longest document trained whole, and the most tokens of a pack (default 128k). {COUNTS}",
            rich_help_panel=_DATA,
        ),
    ] = None
    overlong: Annotated[
        Literal["error", "split", "truncate", "drop"] | None,
        typer.Option(help="What happens to longer documents (default error).", rich_help_panel=_DATA),
    ] = None
    tokenizer: TokenizerOption = None
    record: RecordOption = None
    include: IncludeOption = None
    on_corrupt: OnCorruptOption = None
    strategy: Annotated[str, typer.Option(help=STRATEGY_HELP, rich_help_panel=_HOW)] = "all"
    engine: Annotated[str | None, typer.Option(help=ENGINE_HELP, rich_help_panel=_HOW)] = None
    dp_merge: Annotated[
        bool | None,
        typer.Option(
            "--dp-merge/--no-dp-merge",
            help="Let replicas share documents too long for one of them (slimpack), where faster (default on).",
            rich_help_panel=_HOW,
        ),
    ] = None
    policy: Annotated[
        Literal["choose", "replay", "recompute", "offload"] | None,
        typer.Option(
            help="What documents keep between forward and backward. 'choose' (default): all of it where that fits "
            "memory, else some are recomputed or offloaded.",
            rich_help_panel=_HOW,
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            help="Global batches over which fixed_greedy and fixed_exact pack (default 1).", rich_help_panel=_HOW
        ),
    ] = None
    max_delay_steps: Annotated[
        int | None,
        typer.Option(
            help="Most steps by which wlb and fixed_* with --window train a document later (default 8).",
            rich_help_panel=_HOW,
        ),
    ] = None
    set_options: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any option of planning, as under \\[plan.options] of a configuration: wlb.release=queues, "
            "slimpack.cuts=asymmetric (docs/configuration.md). Repeat for several; wins over the options above.",
            rich_help_panel=_HOW,
        ),
    ] = None
    known_steps: Annotated[
        int | None,
        typer.Option(
            help="Coming batches whose lengths flexpipe knows: over them a switch of layout must pay (default 8; "
            "--set flexpipe.margin=... and others: docs/configuration.md).",
            rich_help_panel=_HOW,
        ),
    ] = None
    steps: Annotated[
        int,
        typer.Option(
            help="Global batches to plan; wlb needs many to put documents off, flexpipe to switch layouts.",
            rich_help_panel=_DATA,
        ),
    ] = 1
    seed: Annotated[int, typer.Option(help="Of the batches sampled from the lengths.", rich_help_panel=_DATA)] = 0
    worst: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Also search N global batches for the one that needs most memory (the longest documents together, "
            "some long ones with many short ones, and their neighbours), under the strategies named or the best one.",
            rich_help_panel=_SEARCH,
        ),
    ] = None
    cost: Annotated[
        Path | None, typer.Option(help="Measured cost file; default: data-sheet numbers.", rich_help_panel=_MODEL)
    ] = None
    search_layout: Annotated[
        bool,
        typer.Option(
            "--search-layout",
            help="Rank all dp x cp x pp x tp x virtual layouts of the cluster for every strategy (seconds to minutes), "
            "and judge each in its best.",
            rich_help_panel=_SEARCH,
        ),
    ] = False
    search_seconds: Annotated[
        float | None,
        typer.Option(
            help=f"Most time for --search-layout (default {DEFAULT_SEARCH_S:g}); what was not looked at is said.",
            rich_help_panel=_SEARCH,
        ),
    ] = None
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures as JSON.", rich_help_panel=_FILES)
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page: table, losses, timelines, memory, documents.", rich_help_panel=_FILES),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Write the best strategy's timeline for Perfetto.", rich_help_panel=_FILES)
    ] = None
    emit_plan: Annotated[
        Path | None, typer.Option(help="Write every planned step as JSON.", rich_help_panel=_FILES)
    ] = None

    @property
    def num_tokens(self) -> int | None:
        return None if self.tokens is None else parse_tokens("--tokens", self.tokens)

    @property
    def context_tokens(self) -> int | None:
        return None if self.context is None else parse_tokens("--context", self.context)

    @property
    def settings(self) -> tuple[str, ...]:
        """Of `plan.options`, as `key=value`; a later one wins."""
        short = {name: getattr(self, name) for name in ("policy", "dp_merge", "window", "max_delay_steps")}
        short["flexpipe.known_steps"] = self.known_steps
        given = (f"{name}={json.dumps(value)}" for name, value in short.items() if value is not None)
        return (*given, *(self.set_options or ()))


def plan_command_of(run: Callable[[PlanArguments], None]) -> Callable[..., None]:
    """What typer makes a command of: its options are the fields, whose types carry typer's annotations; the docstring
    of `run` is its help text."""
    hints = get_type_hints(PlanArguments, include_extras=True)

    def command(**given: Any) -> None:
        run(PlanArguments(**given))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(PlanArguments)
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = run.__doc__
    return command
