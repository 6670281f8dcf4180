"""`PlanArguments`: the arguments and options of `evenload plan`, as fields; and where lengths come from
(`LengthSource`), which `evenload lengths` shares.

A training configuration stands for the documents that it trains, read as it reads them; options of the command line
win, as in `evenload train config.toml data.tokenizer=...`.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import typer

from evenload.cli.options import COUNTS, parse_tokens
from evenload.config.keys import set_options
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.data.config import DataConfig, OnCorrupt, RecordKind
from evenload.data.lengths import LengthTable, count_documents, holds_numbers, read_length_table
from evenload.data.open_encoder import open_encoder
from evenload.data.tokenize import open_tokenizer
from evenload.errors import ConfigError
from evenload.integrations.catalog import ENGINES
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.registry import STRATEGIES, strategy_named
from evenload.plan.strategies.strategy import LeftOutStrategy, Strategy
from evenload.types.cluster import BUILT_IN
from evenload.types.layout import ParallelLayout

SOURCE_HELP = (
    "Document lengths: .npy, .npz, .txt (one a line), .csv or .json of numbers (also .gz); or documents to count "
    "(file, folder, glob, URL); or the config.toml of a run of 'evenload train', for the documents that it trains."
)
DATA_PANEL = "Documents"
"""Over their options in help texts."""
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="Counts documents: a tokenizer.json or its folder. Without it documents are counted in bytes.",
        rich_help_panel=DATA_PANEL,
    ),
]
RecordOption = Annotated[
    RecordKind | None,
    typer.Option(help="What a record of the documents holds (data.record). Default: text.", rich_help_panel=DATA_PANEL),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        help="File names of a folder that are read, such as '*.py'; repeat for several. Default: all.",
        rich_help_panel=DATA_PANEL,
    ),
]
OnCorruptOption = Annotated[
    OnCorrupt | None,
    typer.Option(
        help="Stop at a record that cannot be read, or leave it out. Default: error.", rich_help_panel=DATA_PANEL
    ),
]


@dataclass(frozen=True, kw_only=True)
class LengthSource:
    """Where lengths come from, nothing of it read yet; `run` is the training configuration that was named, `table` what
    was given instead of a name."""

    name: str
    data: DataConfig
    run: TrainConfig | None = None
    table: LengthTable | None = None

    def read(self) -> LengthTable:
        if self.table is not None:
            return self.table
        if self.run is not None:
            return count_documents(self.data, self.name)
        return read_length_table(self.name, self.data)


def length_source(
    source: str,
    *,
    tokenizer: str | None,
    record: RecordKind | None,
    include: list[str] | None,
    on_corrupt: OnCorrupt | None,
    model: str | None = None,
    settings: Sequence[str] = (),
) -> LengthSource:
    """What the options ask for, checked as far as it can be without reading documents.

    A `model` that is a path replaces the configuration's; `settings` are of its `plan.options`, as `key=value`.
    """
    asked: dict[str, Any] = {"tokenizer": tokenizer, "record": record, "include": include, "on_corrupt": on_corrupt}
    asked = {name: tuple(value) if name == "include" else value for name, value in asked.items() if value}
    if source.endswith(".toml"):
        overrides = [f"data.{name}={json.dumps(value)}" for name, value in asked.items()]
        if model is not None and Path(model).exists():
            overrides.append(f"model.path={json.dumps(model)}")
        run = load_train_config(Path(source), [*overrides, *set_options(settings)])
        data = _with_asked_parts(run.data, asked)
        open_tokenizer(data.tokenizer, data.eos_token)
        return LengthSource(name=source, data=data, run=run)
    data = DataConfig(sources=(source,), batch_documents=1, max_document_tokens=1, **asked)
    if data.tokenizer is not None and data.record != "tokens" and open_tokenizer(data.tokenizer).eos_id is None:
        # Nobody can name the token here; its own length stands in the output.
        data = msgspec.structs.replace(data, append_eos=False)
    if not (holds_numbers(source) and data.record == "text"):
        open_encoder(data)
    return LengthSource(name=source, data=data)


def _with_asked_parts(data: DataConfig, asked: dict[str, Any]) -> DataConfig:
    """Parts of a mixture have their own record kind and file names, which the command line replaces, too."""
    own = {name: asked[name] for name in ("record", "include") if name in asked}
    if not own or not data.mixture:
        return data
    return msgspec.structs.replace(data, mixture=tuple(msgspec.structs.replace(part, **own) for part in data.mixture))


def unit_line(table: LengthTable) -> str:
    """What a table in bytes means, and how to get tokens; "" of a table in tokens."""
    if table.unit == "tokens":
        return ""
    return (
        "lengths are counted in bytes, end of document included, because no tokeniser was named; --tokenizer FOLDER "
        "counts what a model sees"
    )


def _built_in(trait: Callable[[Strategy], bool]) -> str:
    return ", ".join(one.name for one in STRATEGIES.built_in.values() if trait(one))


# Without those of other packages: a help text must not fail because a package does.
STRATEGY_HELP = (
    f"'all', or names with commas: {_built_in(lambda one: True)}, and those that other packages add. 'all' leaves out "
    f"{_built_in(lambda one: one.needs_solver)}, which takes its solver's time limit, and "
    f"{_built_in(lambda one: one.needs_one_stage)} where the layout has a pipeline."
)

_WHOLE_CLUSTERS = "it changes the layout of whole clusters, and this one is judged on a part; --layout plans it"


def asked_strategies(text: str) -> tuple[str, ...] | None:
    """The names of `--strategy`, each once; None = all that can run."""
    if text == "all":
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--strategy '{text}' names no strategy; use 'all' or some of {', '.join(STRATEGIES)}")
    for name in names:
        strategy_named(name)
    return names


def chosen_strategies(
    asked: tuple[str, ...] | None, layout: ParallelLayout | None, options: PlanOptions, *, in_part: bool = False
) -> tuple[tuple[str, ...], tuple[LeftOutStrategy, ...]]:
    """What is planned in a layout, and what is left out where all were asked for.

    Args:
        layout: None = each strategy in its own.
        in_part: a part of a large cluster stands for the whole, which changes of its layout cannot be planned in.
    """
    if asked is not None:
        if in_part and (changing := [name for name in asked if strategy_named(name).changes_layout]):
            raise ConfigError(f"--strategy {', '.join(changing)} with --search-layout: {_WHOLE_CLUSTERS}")
        return asked, ()
    left_out = []
    for one in STRATEGIES.values():
        if in_part and one.changes_layout:
            left_out.append(LeftOutStrategy(name=one.name, why=_WHOLE_CLUSTERS))
        if layout is not None and one.needs_one_stage and layout.num_stages > 1:
            why = f"it knows no pipeline, and layout {layout.describe()} has {layout.num_stages} stages; a layout "
            left_out.append(LeftOutStrategy(name=one.name, why=why + "with pp=1 includes it"))
    for one in STRATEGIES.values():
        if one.solver_limit_s is not None:
            limit_s = one.solver_limit_s(options)
            why = f"its solver takes up to {limit_s:g} s for every step; --strategy {one.name} runs it"
            left_out.append(LeftOutStrategy(name=one.name, why=why))
    names = {one.name for one in left_out}
    return tuple(name for name in STRATEGIES if name not in names), tuple(left_out)


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
