"""`evenload plan`, and `evenload.plan` as a function: which strategy is how fast on the user's lengths, model and
cluster. Needs no GPU and no torch."""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from evenload.cli.comparison import Comparison
from evenload.cli.first_lines import equally_fast
from evenload.cli.options import command_of, progress_bar, require_writable, shown_name, write_output
from evenload.cli.plan_inputs import PlanInputs, plan_inputs
from evenload.cli.plan_layout import few_layouts, layout_of_plan, planners_of_layout, search_all_layouts
from evenload.cli.plan_of_steps import judge_recorded_steps
from evenload.cli.plan_request import (
    DEFAULT_SEARCH_S,
    LengthSource,
    PlanRequest,
    chosen_strategies,
    length_source,
    parse_strategies,
    unit_message,
)
from evenload.cost.coefficients import CostCoefficients
from evenload.data.config import DataConfig
from evenload.data.hub import context_limit
from evenload.data.lengths import LengthTable, checked_lengths
from evenload.errors import ConfigError, DataError, InfeasiblePlanError, refusing_unknown
from evenload.explore.evaluate import evaluate_strategies
from evenload.explore.layout_search import LARGE_CLUSTER, layout_sizes
from evenload.explore.prediction_interval import prediction_interval
from evenload.explore.tree_savings import tree_savings
from evenload.explore.worst_batch import find_worst
from evenload.integrations.catalog import BEST, engine_named, require_heads, require_strategy
from evenload.integrations.evaluate import evaluate_engine
from evenload.integrations.planner import EnginePlanner
from evenload.integrations.price import StepShape
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.text import LengthUnit, counted, in_unit

GIVEN = "lengths of the caller"
"""Names lengths that were given as numbers."""
PIPED_WIDTH = 220
"""Columns of the table when the output is not a terminal."""


_OF_COMMAND = ("lengths_per_step", "details", "json_file", "html", "trace", "emit_plan")
"""Options of the command that the function has no use for: a `Comparison` shows and writes itself."""


@refusing_unknown("evenload.plan", [one.name for one in fields(PlanRequest) if one.name not in _OF_COMMAND])
def plan(
    lengths: str | os.PathLike[str] | Sequence[int] | NDArray[np.integer],
    *,
    cluster: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    layout: str | None = None,
    documents: int | None = None,
    tokens: int | str | None = None,
    context: int | str | None = None,
    strategy: str | Sequence[str] = "all",
    steps: int = 1,
    **further: Any,
) -> Comparison:
    """Compare strategies on document lengths, without a GPU: `evenload plan`, with its defaults.

        found = evenload.plan("lengths.npy", model="llama3-8b", cluster="h100x32", context="16k", overlong="truncate")
        print(found.best, found.factor)
        print(found)

    Args:
        lengths: numbers of tokens, or what `evenload plan` takes: a file of lengths, documents that are counted, or the
            config.toml of a run.
        cluster: a built-in name such as "h100x32", or a TOML file. Not needed with a config.toml: this machine.
        model: a built-in name, or a Hugging Face config.json or its folder; not needed with a config.toml.
        layout: such as "dp=4,pp=8". Default: the best of a few, or that of the run.
        documents, tokens: of a global batch, one of both; "128k" is 131,072.
        context: longest document trained whole, and the most tokens of a pack. Default: the longest document, or the
            model's limit where that is shorter.
        strategy: "all", or names.
        steps: global batches to plan.
        further: other options of `evenload plan --help`, with its defaults, or those of the run whose config.toml is
            named: of documents that are counted, of batches, of planning (`set_options` as `--set` takes them),
            searches, and `cost`, a measured cost file.

    Raises:
        ConfigError: settings that cannot work, with the reason. DataError: lengths that are none, or documents that
            cannot be read. InfeasiblePlanError: no layout holds the model. Where strategies do not fit memory their
            rows say so; `Comparison.require_feasible` raises where none does.
    """
    settings = dict(further)
    for name, kind in (("include", list), ("set_options", list), ("cost", lambda cost: Path(cost).expanduser())):
        if settings.get(name) is not None:
            settings[name] = kind(settings[name])
    texts, paths = {"tokens": tokens, "context": context}, {"cluster": cluster, "model": model}
    settings |= {name: str(text) for name, text in texts.items() if text is not None}
    settings |= {name: os.path.expanduser(path) for name, path in paths.items() if path is not None}
    path = os.path.expanduser(lengths) if isinstance(lengths, str | os.PathLike) else None
    request = PlanRequest(
        lengths=GIVEN if path is None else path,
        layout=layout,
        documents=documents,
        strategy=strategy if isinstance(strategy, str) else ",".join(strategy),
        steps=steps,
        **settings,
    )
    return compare(request, _given_lengths(lengths) if path is None else None)


def _given_lengths(lengths: Any) -> LengthSource:
    numbers = np.asarray(lengths)
    if numbers.ndim != 1 or (numbers.size and not np.issubdtype(numbers.dtype, np.integer)):
        raise DataError(
            f"lengths are {numbers.dtype} of shape {numbers.shape}; give one whole number a document, or the name of "
            "a file"
        )
    table = LengthTable(lengths=checked_lengths(numbers.astype(np.int64), GIVEN), unit="tokens", tokenizer=None)
    data = DataConfig(sources=(GIVEN,), batch_documents=1, max_document_tokens=1)
    return LengthSource(name=GIVEN, data=data, table=table)


def compare(request: PlanRequest, source: LengthSource | None = None) -> Comparison:
    """Plan global batches with every strategy, of the lengths of `source` or, without it, those that are requested."""
    # Everything that can be wrong without looking into a document is refused first.
    strategies = parse_strategies(request.strategy)
    if request.worst is not None and request.worst < 1:
        raise ConfigError(f"worst is {request.worst}, must be at least 1 global batch to search")
    if source is None:
        if request.lengths is None:
            raise ConfigError("LENGTHS is missing; give lengths, documents or a config.toml, or --lengths-per-step")
        source = length_source(request.lengths, request, request.model, request.settings)
    inputs = plan_inputs(request, source)
    table = source.read(inputs.batches.context, inputs.batches.overlong, estimated=True)
    has_trees = any(tree.segments for tree in table.trees.values())
    inputs = inputs.within(int(table.lengths.max(initial=1)))
    if request.engine and has_trees:
        raise ConfigError(
            f"--engine {request.engine}: {source.name} has sequences that share prefixes, whose trees only Evenload's "
            "own runtime trains; leave the option out, or write every sequence as a record of its own"
        )
    with _errors_in_unit(table.unit):
        batches = inputs.batches.sample(table.lengths, steps=request.steps, seed=request.seed, trees=table.trees)
        searched = few = None
        if request.search_layout:
            in_part = inputs.cluster.num_devices > LARGE_CLUSTER
            names, left_out = chosen_strategies(strategies, None, inputs.options, in_part=in_part, has_trees=has_trees)
            searched = search_all_layouts(inputs, batches, names, request.search_seconds or DEFAULT_SEARCH_S)
            layout = searched.fastest.best.parallel_layout()
        else:
            layout, few = layout_of_plan(inputs, batches, strategies, is_of_engine=request.engine is not None)
            names, left_out = chosen_strategies(strategies, layout, inputs.options, has_trees=has_trees)
        if request.engine:
            # Before anything is planned, a layout or a strategy named that the engine cannot run.
            profile = engine_named(request.engine)
            for name in strategies or (BEST,):
                require_strategy(profile, name, inputs.options, layout)
            require_heads(profile, inputs.costs.model, layout)
    coefficients = inputs.costs.of(layout)
    planners = searched.planners(inputs, batches) if searched else planners_of_layout(inputs, layout)
    with progress_bar() as on_progress:
        evaluation = evaluate_strategies(planners, batches, names, on_progress=on_progress)
    near = equally_fast(evaluation)
    savings = tree_savings(planners, batches, evaluation, near[0]) if near else None
    engine = worst = None
    if request.engine:
        planner = _engine_planner(request.engine, inputs, layout)
        with progress_bar() as on_progress:
            engine = evaluate_engine(planner, batches, strategies, on_progress=on_progress)
    if request.worst is not None:
        searched_for = strategies or filter(None, [evaluation.best])
        drawn = {"lengths": table.lengths, "trees": table.trees, "rule": inputs.batches, "seed": request.seed}
        search = functools.partial(find_worst, **drawn)
        with progress_bar() as on_progress:
            worst = tuple(
                search(planners.of(name).planner, strategy=name, count=request.worst, on_progress=on_progress)
                for name in searched_for
                # One that changes the layout has no one limit.
                if evaluation.best and evaluation.proposals[name] and not STRATEGIES.named(name).changes_layout
            )
    if inputs.layout is not None and not engine and len(inputs.run_layouts) < 2:
        few = few_layouts(inputs, batches, strategies, evaluation.best)
    shown = _inputs_content(request, inputs, shown_name(source.name), table, layout)
    return Comparison(
        inputs=shown,
        unit=table.unit,
        batches=batches,
        evaluation=evaluation,
        left_out=left_out,
        searched=searched,
        worst=worst,
        savings=savings,
        engine=engine,
        interval=prediction_interval(coefficients, layout),
        memory_cap_bytes=inputs.memory_cap_bytes,
        few_layouts=few,
        facts=_inputs_message(shown, table, layout, coefficients),
        remarks=_remarks(request, inputs, layout, unit_message(table)),
    )


def _remarks(request: PlanRequest, inputs: PlanInputs, layout: ParallelLayout, unit: str) -> tuple[str, ...]:
    """Say what the figures rest on that a user may not expect."""
    coefficients, policies = inputs.costs.of(layout), ("choose", "offload")
    can_offload = coefficients.host_link is not None and inputs.options.policy in policies and not request.engine
    host = (
        f"host memory: cluster {inputs.cluster.name} says no host_memory_bytes, so activations are offloaded as if its "
        "nodes had room for all"
    )
    remarks = (
        inputs.costs.model.whole_documents,
        _tensor_refusal(inputs.costs.model, layout),
        unit,
        *(f"cost: {message}" for message in inputs.costs.messages(layout)),
        host if inputs.host.limit_bytes is None and can_offload else "",
    )
    return tuple(filter(None, remarks))


def _engine_planner(engine: str, inputs: PlanInputs, layout: ParallelLayout) -> EnginePlanner:
    """Plan on the engine, with micro-batches as `PackedLoader` makes them for it."""
    profile, costs, options = engine_named(engine), inputs.costs, inputs.options
    shape = StepShape(
        micro_batches=options.micro_batches if profile.is_constant_in(layout) else None,
        pack_tokens=options.max_pack_tokens if profile.pads_in(layout) else None,
    )
    return EnginePlanner(profile, costs.model, costs.of(layout), layout, options, shape)


def _tensor_refusal(model: ModelSpec, layout: ParallelLayout) -> str:
    refused = model.tensor_refusal if layout.tp > 1 else ""
    return refused and f"evenload train refuses tp={layout.tp} here: {model.name} {refused}"


def _inputs_content(
    request: PlanRequest, inputs: PlanInputs, lengths: str, table: LengthTable, layout: ParallelLayout
) -> dict[str, Any]:
    """Return `inputs` of `--json`: everything that decides the figures."""
    options, batches, model = inputs.options, inputs.batches, inputs.costs.model
    return {
        "lengths": lengths,
        "unit": table.unit,
        "tokenizer": table.tokenizer,
        "model": inputs.model_name,
        "model_size": model.describe_size(),
        "parameters": model.num_parameters,
        "active_parameters": model.num_active_parameters,
        "has_adapters": model.has_adapters,
        "whole_documents": model.whole_documents,
        "tensor_refusal": _tensor_refusal(model, layout),
        "cluster": inputs.cluster_name,
        "layout": layout_sizes(layout),
        "is_layout_given": inputs.layout is not None or request.engine is not None or request.search_layout,
        "stage_layers": layout.stage_counts,
        "devices": inputs.cluster.num_devices,
        "data_documents": len(table.lengths),
        "data_trees": sum(bool(tree.segments) for tree in table.trees.values()),
        "documents": batches.num_documents,
        "tokens": batches.num_tokens,
        "context": batches.context,
        "context_from": inputs.context_from,
        "context_limit": context_limit(inputs.model_name),
        "overlong": batches.overlong,
        **{name: getattr(options, name) for name in ("policy", "dp_merge", "window", "max_delay_steps")},
        "strategy_options": {own.__struct_config__.tag: msgspec.to_builtins(own) for own in options.strategies},
        "known_steps": options.own(FlexOptions).known_steps,
        **{name: getattr(request, name) for name in ("strategy", "steps", "seed", "text_column", "group_by", "record")},
        "cost": str(inputs.costs.cost_file or "analytic"),
        "memory_cap_bytes": inputs.memory_cap_bytes,
        "host_memory_cap_bytes_per_node": inputs.host.limit_bytes,
    }


def _inputs_message(
    inputs: dict[str, Any], table: LengthTable, layout: ParallelLayout, coefficients: CostCoefficients
) -> str:
    """List all inputs on one line, so that a copied output can be repeated."""
    size = f"{inputs['tokens']:,} {table.unit}" if inputs["tokens"] else counted(inputs["documents"], "document")
    unused = inputs["devices"] - layout.world_size
    devices = f" ({unused} of {inputs['devices']} devices unused)" if unused else ""
    lengths, tokenizer = table.lengths, f"; tokeniser {table.tokenizer}" if table.tokenizer else ""
    origin = f" ({inputs['context_from']})" if inputs["context_from"] else ""
    trees = f", {inputs['data_trees']:,} of them trees" if inputs["data_trees"] else ""
    return (
        f"evenload {version('evenload')} plan: {inputs['lengths']} ({counted(len(lengths), 'document')}{trees}, median "
        f"{int(np.median(lengths)):,}, longest {int(lengths.max()):,} {table.unit}{tokenizer}), "
        f"model {inputs['model']} ({inputs['model_size']}), cluster {inputs['cluster']}, "
        f"layout {layout.describe()}{devices}, {size} a step, {counted(inputs['steps'], 'step')}, "
        f"context {inputs['context']:,}{origin}, overlong {inputs['overlong']}, seed {inputs['seed']}, "
        f"{coefficients.source} costs"
    )


@contextmanager
def _errors_in_unit(unit: LengthUnit) -> Iterator[None]:
    """Raise errors about lengths in the unit that was counted."""
    try:
        yield
    except (ConfigError, DataError, InfeasiblePlanError) as error:
        if unit == "tokens":
            raise
        raise type(error)(in_unit(str(error), unit)) from error


def run_plan(request: PlanRequest) -> None:
    """Compare strategies on your document lengths, without a GPU.

    Draws global batches from the lengths, plans each with every strategy, simulates the pipeline over time with
    its memory, and shows who is fastest within memory.

    With the config.toml of a run in place of LENGTHS, the documents, tokeniser, model, layout, context, batch size and
    \\[plan.options] are those of the run; options given here win.

    [bold]Example[/bold]: evenload plan examples/lengths/github_dirs.npy.gz --model llama-7b --cluster h100x32
    --layout dp=4,pp=8 --context 16k --overlong truncate --documents 512

    With --lengths-per-step FILE.jsonl it predicts the steps of a run of any other trainer instead.

    Exit code: 0 ok, 2 wrong input, 3 no strategy fits, or not with the batch that --worst found.
    """
    require_writable(request.json_file, request.html, request.trace, request.emit_plan)
    console = Console() if Console().is_terminal else Console(width=PIPED_WIDTH)
    if request.lengths_per_step is not None:
        judge_recorded_steps(request, request.lengths_per_step, console)
        return
    comparison = compare(request)
    comparison.show(console, details=request.details)
    if request.json_file:
        write_output(request.json_file, comparison.to_json())
    if request.emit_plan:
        write_output(request.emit_plan, comparison.plan_file())
    if request.html:
        comparison.write_html(request.html)
    if request.trace:
        comparison.write_trace(request.trace)
    comparison.require_feasible()


plan_command = command_of(PlanRequest, run_plan)
