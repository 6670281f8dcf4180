"""`PlanRequest`: the arguments and options of `evenload plan`, and sources of document lengths (`LengthSource`), which
`evenload lengths` shares. A training configuration stands for the documents that it trains; options win over it."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.markup import escape

from evenload.cli.options import COUNTS, argument, option, parse_tokens
from evenload.config.keys import set_options
from evenload.config.tokenizer import with_found_kinds
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.data.chat_encoding import open_encoder
from evenload.data.config import DataConfig, OnCorrupt, Overlong, RecordKind
from evenload.data.lengths import LengthTable, count_documents, may_be_numbers, read_length_table, with_counted_chats
from evenload.data.tokenize import open_tokenizer
from evenload.errors import ConfigError
from evenload.integrations.catalog import ENGINES
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES, strategy_named
from evenload.planning.strategies.strategy import LeftOutStrategy
from evenload.types.cluster import BUILT_IN
from evenload.types.layout import ParallelLayout

# ruff: noqa: RUF009  (`option` makes a field, whose default is no call)
SOURCE_HELP = (
    "Document lengths: .npy, .npz, .txt (one a line), .csv or .json of numbers (also .gz); or documents to count "
    "(file, folder, glob, URL); or the config.toml of a run of 'evenload train', for the documents that it trains."
)


_MODEL, _DATA, _HOW, _SEARCH, _FILES = "Model and cluster", "Documents", "Strategies", "Searches", "Files to write"


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """Options of documents whose tokens are counted; None = not given."""

    tokenizer: str | None = option(_DATA, "A tokenizer.json or its folder; without one, plan takes 4 bytes as a token.")
    record: RecordKind | None = option(_DATA, "What a record of the documents holds (data.record). Default: auto.")
    text_column: str | None = option(_DATA, "Key or column of the text, where it is not 'text' (data.text_column).")
    group_by: str | None = option(_DATA, "Key or column: equal records in a row share prefixes (data.group_by).")
    include: list[str] | None = option(_DATA, "Names of files to read, such as '*.py'; may be repeated (default all).")
    on_corrupt: OnCorrupt | None = option(_DATA, "Stop at a record that cannot be read, or skip it (default error).")

    def data_settings(self) -> dict[str, Any]:
        given = {one.name: getattr(self, one.name) for one in fields(DocumentOptions)}
        return {name: tuple(value) if name == "include" else value for name, value in given.items() if value}


@dataclass(frozen=True, kw_only=True)
class LengthSource:
    """Where lengths come from, before anything is read: `run` is a named configuration, `table` lengths as given."""

    name: str
    data: DataConfig
    run: TrainConfig | None = None
    table: LengthTable | None = None

    def read(self, context: int = sys.maxsize, overlong: Overlong = "split", *, estimated: bool = False) -> LengthTable:
        """Return the lengths, counting tokens of documents where they are not known; sequences that may share prefixes
        have at most `context` tokens, longer ones are treated as `overlong` says, and without a run trees are whole.
        Without a tokeniser tokens are `estimated`."""
        if self.table is not None:
            return self.table
        of_run = self.data.max_tree_tokens if self.run else sys.maxsize
        most = of_run and max(context, of_run)
        data = msgspec.structs.replace(self.data, max_document_tokens=context, overlong=overlong, max_tree_tokens=most)
        # Counting tokens takes time; the spinner shows on terminals only.
        with Console(stderr=True).status(f"reading {escape(self.name)}"):
            if self.run:
                return count_documents(data, self.name)
            return read_length_table(self.name, data, estimated=estimated and data.tokenizer is None)


def length_source(
    source: str, options: DocumentOptions, model: str | None = None, settings: Sequence[str] = ()
) -> LengthSource:
    """Resolve a source of lengths, and check it as far as it can be without reading documents. A `model` that is a path
    replaces the configuration's; `settings` are of its `plan.options`, as `key=value`."""
    given = options.data_settings()
    if source.endswith(".toml"):
        overrides = [f"data.{name}={json.dumps(value)}" for name, value in given.items()]
        if model is not None and Path(model).exists():
            overrides.append(f"model.path={json.dumps(model)}")
        run = load_train_config(Path(source), [*overrides, *set_options(settings)])
        # Parts of a mixture have their own record kind and file names, which the command line replaces, too.
        of_parts = {name: given[name] for name in ("record", "include") if name in given}
        parts = tuple(msgspec.structs.replace(part, **of_parts) for part in run.data.mixture)
        data = with_found_kinds(msgspec.structs.replace(run.data, mixture=parts), run.model.path)
        open_tokenizer(data.tokenizer, data.eos_token)
        return LengthSource(name=source, data=data, run=run)
    data = DataConfig(sources=(source,), batch_documents=1, max_document_tokens=1, **given)
    if data.tokenizer is not None and data.record != "tokens" and open_tokenizer(data.tokenizer).eos_id is None:
        # Nobody can name the token here; its own length stands in the output.
        data = msgspec.structs.replace(data, append_eos=False)
    if data.record != "auto" and not may_be_numbers(source, data):
        data = with_counted_chats(data)
        open_encoder(data)
    return LengthSource(name=source, data=data)


def unit_message(table: LengthTable) -> str:
    """Say what records were counted, what a table in bytes means, and how to get tokens; "" for a table of numbers."""
    in_bytes = "lengths are counted in bytes, end of document included; name a tokeniser by --tokenizer FOLDER"
    return "\n".join(filter(None, (table.records, in_bytes if table.unit == "bytes" else "")))


# Without those of other packages: a help text must not fail because a package does.
_BUILT_IN_STRATEGIES = STRATEGIES.built_in.values()
_STRATEGY_HELP = (
    f"'all', or names with commas: {', '.join(one.name for one in _BUILT_IN_STRATEGIES)}, and those that packages "
    f"add. 'all' leaves out {', '.join(one.name for one in _BUILT_IN_STRATEGIES if one.needs_solver)}, which takes its "
    f"solver's time limit, and {', '.join(one.name for one in _BUILT_IN_STRATEGIES if one.needs_one_stage)} where the "
    "layout has a pipeline."
)
_WHOLE_CLUSTERS = "it changes the layout of whole clusters, and this one is judged on a part; --layout plans it"


def parse_strategies(text: str) -> tuple[str, ...] | None:
    """Read the names of `--strategy`, each once; None = all that can run."""
    if text == "all":
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--strategy '{text}' names no strategy; use 'all' or some of {', '.join(STRATEGIES)}")
    for name in names:
        strategy_named(name)
    return names


def chosen_strategies(
    names: tuple[str, ...] | None,
    layout: ParallelLayout | None,
    options: PlanOptions,
    *,
    in_part: bool = False,
    has_trees: bool = False,
) -> tuple[tuple[str, ...], tuple[LeftOutStrategy, ...]]:
    """Return the strategies that are planned in a layout (None = each in its own), and those left out where all were
    requested (`names` None). `in_part`: a part of a large cluster is planned, in which no layout can be changed;
    `has_trees`: documents are trees of shared prefixes."""
    if names is not None:
        if in_part and (changing := [name for name in names if strategy_named(name).changes_layout]):
            raise ConfigError(f"--strategy {', '.join(changing)} with --search-layout: {_WHOLE_CLUSTERS}")
        return names, ()
    chosen, left_out = [], []
    for one in STRATEGIES.values():
        why = ""
        if in_part and one.changes_layout:
            why = _WHOLE_CLUSTERS
        elif has_trees and not one.plans_trees:
            why = "it does not plan trees of shared prefixes"
        elif layout is not None and one.needs_one_stage and layout.num_stages > 1:
            stages = f"layout {layout.describe()} has {layout.num_stages} stages"
            why = f"it knows no pipeline, and {stages}; a layout with pp=1 includes it"
        elif one.solver_limit_s is not None:
            limit_s = one.solver_limit_s(options)
            why = f"its solver takes up to {limit_s:g} s for every step; --strategy {one.name} runs it"
        if why:
            left_out.append(LeftOutStrategy(name=one.name, why=why))
        else:
            chosen.append(one.name)
    return tuple(chosen), tuple(left_out)


DEFAULT_DOCUMENTS = 512  # of a global batch
DEFAULT_CONTEXT = 131_072  # tokens, of a model whose limit is not known
DEFAULT_SEARCH_S = 300.0


@dataclass(frozen=True, kw_only=True)
class PlanRequest(DocumentOptions):
    """What `evenload plan` or `evenload.plan` is to compute; None = not given."""

    lengths: str | None = argument("LENGTHS", SOURCE_HELP, default=None)
    lengths_per_step: str | None = option(
        _DATA,
        "Instead of LENGTHS: the steps of a run of any trainer, one a line, with their partition if known; says what "
        "they lost to waiting, and what evenload.micro_batches would take (docs/plan.md).",
        metavar="FILE.jsonl",
    )
    cluster: str | None = option(
        _MODEL,
        f"Built-in name ({', '.join(BUILT_IN)}, then x and how many: h100x32), or a TOML file such as "
        "examples/clusters/two_nodes.toml (explained in docs/plan.md). "
        "Needed, but with a config.toml: then this machine, its GPUs or, on the CPU, what a cost file says of it.",
    )
    model: str | None = option(
        _MODEL,
        "Built-in name (llama3-8b, qwen3-8b, ...), an HF config.json, or a name on the HF Hub. Needed, but with a "
        "config.toml.",
    )
    layout: str | None = option(
        _MODEL, "For example dp=4,pp=8. Also virtual=2. Default: the best of a few. Stages get layers by cost."
    )
    documents: int | None = option(_DATA, f"Documents of a global batch (default {DEFAULT_DOCUMENTS}).")
    tokens: str | None = option(_DATA, f"Tokens of a global batch, instead of --documents. {COUNTS}", metavar="TOKENS")
    context: str | None = option(
        _DATA,
        "Longest document trained whole, and the most tokens of a pack. Default: the longest of the documents, or "
        f"the model's limit where that is shorter. {COUNTS}",
        metavar="TOKENS",
    )
    overlong: Overlong | None = option(_DATA, "What happens to longer documents (default truncate, or as in the run).")
    strategy: str = option(_HOW, _STRATEGY_HELP, default="all")
    engine: str | None = option(
        _HOW,
        f"Also predict an engine that trains the plans: {', '.join(ENGINES)}. Strategies that it cannot run are "
        "refused, with the reason (docs/engines.md).",
    )
    dp_merge: bool | None = option(
        _HOW,
        "Let replicas share documents too long for one of them (slimpack), where faster (default on).",
        "--dp-merge/--no-dp-merge",
    )
    policy: Literal["choose", "replay", "recompute", "offload"] | None = option(
        _HOW,
        "What documents keep between forward and backward. 'choose' (default): all of it where that fits memory, else "
        "some are recomputed or offloaded.",
    )
    window: int | None = option(_HOW, "Global batches over which fixed_greedy and fixed_exact pack (default 1).")
    max_delay_steps: int | None = option(
        _HOW, "Most steps by which wlb and fixed_* with --window train a document later (default 8)."
    )
    set_options: list[str] | None = option(
        _HOW,
        "Any option of planning, as under \\[plan.options] of a configuration: wlb.release=queues, "
        "slimpack.cuts=asymmetric (docs/configuration.md). Repeat for several; wins over the options above.",
        "--set",
        metavar="KEY=VALUE",
    )
    known_steps: int | None = option(
        _HOW,
        "Coming batches whose lengths flexpipe knows: over them a switch of layout must pay (default 8; "
        "--set flexpipe.margin=... and others: docs/configuration.md).",
    )
    steps: int = option(_DATA, "Global batches to plan; wlb (delays) and flexpipe (switches) need many.", default=1)
    seed: int = option(_DATA, "Of the batches sampled from the lengths.", default=0)
    worst: int | None = option(
        _SEARCH,
        "Also search N global batches for the one that needs most memory (the longest documents together, some long "
        "ones with many short ones, and their neighbours), under the strategies named or the best one.",
        min=1,
        metavar="N",
    )
    cost: Path | None = option(_MODEL, "Measured cost file; default: data-sheet numbers.")
    search_layout: bool = option(
        _SEARCH,
        "Rank all dp x cp x pp x tp x virtual layouts of the cluster for every strategy (seconds to minutes), and "
        "judge each in its best.",
        "--search-layout",
        default=False,
    )
    search_seconds: float | None = option(
        _SEARCH, f"Most time for --search-layout (default {DEFAULT_SEARCH_S:g}); layouts not searched are counted."
    )
    details: bool = option(
        _HOW, "Also print the slower strategies, all that fits the width, and how figures came about.", default=False
    )
    json_file: Path | None = option(_FILES, "Write all figures as JSON.", "--json")
    html: Path | None = option(_FILES, "Write a page: table, losses, timelines, memory, documents.")
    trace: Path | None = option(_FILES, "Write the best strategy's timeline for Perfetto.")
    emit_plan: Path | None = option(_FILES, "Write every planned step as JSON.")

    def tokens_of(self, name: Literal["tokens", "context"]) -> int | None:
        """Return an option that is a count, such as "128k"."""
        text = getattr(self, name)
        return None if text is None else parse_tokens(f"--{name}", text)

    @property
    def settings(self) -> tuple[str, ...]:
        """Of `plan.options`, as `key=value`; a later one wins."""
        short = {name: getattr(self, name) for name in ("policy", "dp_merge", "window", "max_delay_steps")}
        short["flexpipe.known_steps"] = self.known_steps
        given = (f"{name}={json.dumps(value)}" for name, value in short.items() if value is not None)
        return (*given, *(self.set_options or ()))
