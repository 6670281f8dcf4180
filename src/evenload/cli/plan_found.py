"""`find_plans`: all of `evenload plan` but its output, for the command and for `evenload.plan`: inputs, strategies, the
engine asked for, and the sentences about them."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from evenload.cli.options import progress_bar, shown_name
from evenload.cli.plan_arguments import (
    DEFAULT_SEARCH_S,
    LengthSource,
    PlanArguments,
    asked_strategies,
    chosen_strategies,
    length_source,
    unit_line,
)
from evenload.cli.plan_inputs import PlanInputs, plan_inputs
from evenload.cli.plan_layout import (
    SearchedLayouts,
    layouts_that_fit,
    option_of,
    planned_in,
    planners_of_search,
    searched_layouts,
)
from evenload.cost.coefficients import CostCoefficients
from evenload.data.lengths import LengthTable
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.batches import SampledBatch
from evenload.explore.evaluate import Evaluation, Headline, StrategyPlanners, evaluate_strategies, headline
from evenload.explore.layout_search import LARGE_CLUSTER, LayoutResult, layout_sizes
from evenload.explore.prediction_interval import PredictionInterval, prediction_interval
from evenload.explore.worst_batch import WorstBatch, find_worst
from evenload.integrations.catalog import BEST, EngineProfile, engine_named, require_heads, require_strategy
from evenload.integrations.evaluate import EngineEvaluation, evaluate_engine
from evenload.integrations.planner import EnginePlanner
from evenload.integrations.price import StepShape
from evenload.plan.layouts.flex_planner import FlexPlanner
from evenload.plan.planner import StepPlanner
from evenload.plan.strategies.baselines import BEST_FIT
from evenload.plan.strategies.flexpipe import FlexOptions
from evenload.plan.strategies.registry import STRATEGIES
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.report.units import (
    format_interval,
    format_layout,
    format_percent,
    format_power_of_two,
    format_seconds,
)
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.text import LengthUnit, counted, format_bytes, in_unit


@dataclass(frozen=True, eq=False, kw_only=True)
class FoundPlans:
    """What was planned, and how it is said: inputs as in `--json`, rows as in the table (the baseline among them, where
    its windows are others), the outcome in a sentence, layouts of a search with the best first, what `--engine` takes,
    the worst batches where they were asked for, and other layouts where the one planned in does not fit."""

    said: dict[str, Any]
    batches: Sequence[SampledBatch]
    evaluation: Evaluation
    rows: list[dict[str, Any]]
    headline: str
    left_out: tuple[LeftOutStrategy, ...]
    searched: SearchedLayouts | None
    worst: tuple[WorstBatch, ...] | None
    unit: LengthUnit
    memory_cap_bytes: int
    interval: PredictionInterval
    engine: EngineEvaluation | None = None
    fitting: str = ""

    @property
    def layouts(self) -> tuple[LayoutResult, ...]:
        """Of a search those of the fastest strategy, the best first; else none."""
        return self.searched.fastest.layouts if self.searched else ()

    def require_whole(self, strategy: str, what: str) -> None:
        """`ConfigError` where a strategy was planned on a part of a large cluster: its plans are not the cluster's."""
        if self.searched and (best := self.searched.of(strategy).best).stride > 1:
            raise ConfigError(
                f"{what}: the search judged {strategy} on one of {best.stride} replicas and documents, because the "
                f"cluster has more than {LARGE_CLUSTER} devices, so there are no plans of whole steps; plan with its "
                f"layout instead of a search: --layout {option_of(best)}"
            )

    def require_feasible(self) -> None:
        """`InfeasiblePlanError` where no strategy fits memory, or not with the batch that `--worst` found."""
        # What an engine holds depends on its settings, so memory refuses plans for Evenload's own runtime only.
        if self.evaluation.best is None and not (self.engine and self.engine.best):
            closest = min(self.rows, key=lambda row: row["peak_memory_bytes"] or float("inf"))
            hint = f"; {self.fitting}" if self.fitting else ""
            raise InfeasiblePlanError(f"no strategy fits; the closest: {closest['why']}{hint}")
        if exceeding := [one.strategy for one in self.worst or () if not one.fits]:
            raise InfeasiblePlanError(
                f"the lengths hold global batches that exceed memory under {', '.join(exceeding)} (the lines above "
                "name one for each); train with a policy that fits, in another layout, or on smaller batches"
            )


def find_plans(asked: PlanArguments, console: Console, source: LengthSource | None = None) -> FoundPlans:
    """Plan what was asked for.

    Args:
        console: where the inputs, and layouts of a search, are said before strategies are planned.
        source: of lengths that are there already; default: what `asked.lengths` names.
    """
    # Everything that can be wrong without looking into a document is found first.
    strategies = asked_strategies(asked.strategy)
    if asked.worst is not None and asked.worst < 1:
        raise ConfigError(f"worst is {asked.worst}, must be at least 1 global batch to search")
    if source is None:
        source = length_source(
            asked.lengths,
            tokenizer=asked.tokenizer,
            record=asked.record,
            include=asked.include,
            on_corrupt=asked.on_corrupt,
            model=asked.model,
            settings=asked.settings,
        )
    inputs = plan_inputs(asked, source)
    if asked.engine:
        inputs = replace(inputs, layout=engine_layout(inputs, asked.engine))
    # Counting the tokens of documents takes time; the spinner shows on terminals only.
    with Console(stderr=True).status(f"reading {escape(source.name)}"):
        table = source.read()
    with errors_in_unit(table.unit):
        batches = inputs.batches.sample(table.lengths, steps=asked.steps, seed=asked.seed)
        searched = None
        if asked.search_layout:
            in_part = inputs.machines.num_devices > LARGE_CLUSTER
            names, left_out = chosen_strategies(strategies, None, inputs.options, in_part=in_part)
            limit_s = asked.search_seconds or DEFAULT_SEARCH_S
            searched = searched_layouts(inputs, batches, names, console, limit_s)
            layout = searched.fastest.best.parallel_layout()
        else:
            layout = planned_in(inputs, batches, strategies)
            names, left_out = chosen_strategies(strategies, layout, inputs.options)
        if asked.engine:
            require_engine(asked.engine, inputs, strategies, layout)
    coefficients = inputs.costs.of(layout)
    said = inputs_said(asked, inputs, shown_name(source.name), table, layout)
    say(console, first_line(said, table, layout, coefficients), unit_line(table))
    say(console, *(f"cost: {note}" for note in inputs.costs.notes(layout)))
    say(console, "" if asked.engine else host_line(inputs, coefficients))
    planners = planners_of_search(searched, inputs, batches) if searched else _planners(inputs, layout)
    with progress_bar() as on_progress:
        evaluation = evaluate_strategies(planners, batches, names, on_progress=on_progress)
    engine = engine_evaluation(asked.engine, inputs, layout, batches, strategies) if asked.engine else None
    has_none = evaluation.best is None and not (engine and engine.best)
    return FoundPlans(
        said=said,
        batches=batches,
        evaluation=evaluation,
        rows=comparison_rows(evaluation, table.unit),
        headline=in_unit(headline_line(headline(evaluation), evaluation), table.unit),
        left_out=left_out,
        searched=searched,
        unit=table.unit,
        worst=_worst(asked, inputs, planners, table.lengths, strategies, evaluation),
        memory_cap_bytes=inputs.memory_cap_bytes,
        interval=prediction_interval(coefficients, layout),
        engine=engine,
        fitting=layouts_that_fit(inputs, batches, strategies) if has_none and not searched else "",
    )


def say(console: Console, *lines: str) -> None:
    """Lines that are not empty, as they are."""
    for line in filter(None, lines):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _planners(inputs: PlanInputs, layout: ParallelLayout) -> StrategyPlanners:
    """All strategies in one layout."""
    costs = inputs.costs
    planner = StepPlanner(
        costs.model, costs.of(layout), layout, inputs.memory_cap_bytes, inputs.options, host=inputs.host
    )
    return StrategyPlanners(planner=planner, flexible=FlexPlanner(planner, costs.of, layouts=inputs.layouts))


def _worst(
    asked: PlanArguments,
    inputs: PlanInputs,
    planners: StrategyPlanners,
    lengths: NDArray[np.int64],
    strategies: tuple[str, ...] | None,
    evaluation: Evaluation,
) -> tuple[WorstBatch, ...] | None:
    """Of the strategies asked for by name, else of the best one; those that change the layout have no one limit."""
    if asked.worst is None:
        return None
    if evaluation.best is None:
        return ()
    planned = [name for name in strategies or (evaluation.best,) if evaluation.proposals[name]]
    drawn = functools.partial(find_worst, lengths=lengths, rule=inputs.batches, count=asked.worst, seed=asked.seed)
    with progress_bar() as on_progress:
        return tuple(
            drawn(planners.of(name).planner, strategy=name, on_progress=on_progress)
            for name in planned
            if not STRATEGIES.named(name).changes_layout
        )


_SAME = 0.0005
"""Factors that print alike."""


def inputs_said(
    asked: PlanArguments, inputs: PlanInputs, lengths: str, table: LengthTable, layout: ParallelLayout
) -> dict[str, Any]:
    """`inputs` of `--json`: everything that decides the figures."""
    options = inputs.options
    return {
        "lengths": lengths,
        "unit": table.unit,
        "tokenizer": table.tokenizer,
        "model": inputs.model_name,
        "model_size": inputs.costs.model.describe_size(),
        "parameters": inputs.costs.model.num_parameters,
        "active_parameters": inputs.costs.model.num_active_parameters,
        "cluster": inputs.cluster_name,
        "layout": layout_sizes(layout),
        "stage_layers": layout.stage_counts,
        "devices": inputs.machines.num_devices,
        "documents": inputs.batches.num_documents,
        "tokens": inputs.batches.num_tokens,
        "context": inputs.batches.context,
        "overlong": inputs.batches.overlong,
        "policy": options.policy,
        "dp_merge": options.dp_merge,
        "window": options.window,
        "max_delay_steps": options.max_delay_steps,
        "strategy_options": {own.__struct_config__.tag: msgspec.to_builtins(own) for own in options.strategies},
        "known_steps": options.own(FlexOptions).known_steps,
        "steps": asked.steps,
        "seed": asked.seed,
        "cost": inputs.cost_name,
        "memory_cap_bytes": inputs.memory_cap_bytes,
        "host_memory_cap_bytes_per_node": inputs.host.limit_bytes,
    }


def first_line(said: dict[str, Any], table: LengthTable, layout: ParallelLayout, coefficients: CostCoefficients) -> str:
    """All inputs on one line, so that a copied output can be repeated."""
    size = f"{said['tokens']:,} {table.unit}" if said["tokens"] else counted(said["documents"], "document")
    unused = said["devices"] - layout.world_size
    devices = f" ({unused} of {said['devices']} devices unused)" if unused else ""
    lengths, tokenizer = table.lengths, f"; tokeniser {table.tokenizer}" if table.tokenizer else ""
    return (
        f"evenload {version('evenload')} plan: {said['lengths']} ({counted(len(lengths), 'document')}, median "
        f"{int(np.median(lengths)):,}, longest {int(lengths.max()):,} {table.unit}{tokenizer}), "
        f"model {said['model']} ({said['model_size']}), cluster {said['cluster']}, "
        f"layout {layout.describe()}{devices}, {size} a step, "
        f"{counted(said['steps'], 'step')}, context {said['context']:,}, overlong {said['overlong']}, seed "
        f"{said['seed']}, "
        f"{coefficients.source} costs"
    )


def host_line(inputs: PlanInputs, coefficients: CostCoefficients) -> str:
    """That nothing limits what is offloaded, where the cluster's description leaves it out; "" = it does not matter."""
    can_offload = coefficients.host_link is not None and inputs.options.policy in ("choose", "offload")
    if inputs.host.limit_bytes is not None or not can_offload:
        return ""
    return (
        f"host memory: cluster {inputs.machines.name} says no host_memory_bytes, so activations are offloaded as if "
        "its nodes had room for all"
    )


def bound_line(evaluation: Evaluation) -> str:
    """What bounds the best strategy's slowest step: the critical path, by rank and kind."""
    assert evaluation.best is not None, "only of a best strategy"
    proposals = evaluation.proposals[evaluation.best]
    proposal = max(proposals, key=lambda one: one.plan.predicted.step_time_s)
    dp_rank, path = proposal.critical_path()
    replica = f" of replica {dp_rank}" if proposal.plan.layout.dp > 1 else ""
    step = f" of step {proposal.plan.step}" if len(proposals) > 1 else ""
    after_s = proposal.plan.predicted.step_time_s - proposal.switch_s - path.makespan_s
    switch = f"switch of layout {format_seconds(proposal.switch_s)}, then " if proposal.switch_s else ""
    return (
        f"{evaluation.best}: critical path{step}: {switch}pipeline{replica} {format_seconds(path.makespan_s)}, "
        f"{path.describe()}; then reduction and optimizer {format_seconds(after_s)}"
    )


def headline_line(found: Headline | None, evaluation: Evaluation) -> str:
    """The comparison in one sentence; "" where nothing fits memory."""
    if found is None:
        return ""
    interval = f" (90 % of steps: {format_interval(found.interval_s)})" if found.interval_s else ""
    apart = found.baseline_layout not in (None, found.layout)
    where = f" in {format_layout(found.layout)}" if apart else ""
    step = f"{format_seconds(found.step_time_s)} a step{interval}"
    said = f"{found.best}{where} is the fastest by prediction: {step}"
    names = [result.name for result in evaluation.results]
    if found.factor is None or found.baseline_window_tokens is None:
        why = "best_fit does not fit memory" if BEST_FIT.name in names else "best_fit was not compared"
        return f"{said}; {why}, so there is no factor"
    window = format_power_of_two(found.baseline_window_tokens)
    if found.best == BEST_FIT.name and found.factor > 1 - _SAME:
        return f"{said}, and no other windows suit it better than its {window} tokens"
    bound = f"no plan in its layout takes less than {format_percent(found.fraction_of_layout_bound)} of that"
    if found.factor < 1 - _SAME:
        there = f" in {format_layout(found.baseline_layout)}" if apart else ""
        faster_s = format_seconds(found.factor * found.step_time_s)
        return (
            f"{found.best}{where} is the fastest of those asked for by prediction: {step}; {bound}. best_fit in "
            f"windows of {window} tokens{there} (--set best_fit.window_tokens={found.baseline_window_tokens}) is "
            f"faster: {faster_s} a step, {1 / found.factor:.2f} times as fast"
        )
    said += f", {found.factor:.2f} times as fast as best_fit in the windows that suit it best, {window} tokens"
    said += f" in {format_layout(found.baseline_layout)}" if apart else ""
    if found.reasons:
        lost = " and ".join(
            f"{one.cause} ({format_percent(one.baseline_share)} of its step, here {format_percent(one.best_share)})"
            for one in found.reasons
        )
        said += f", which loses more to {lost}"
    return f"{said}; {bound}"


def comparison_rows(evaluation: Evaluation, unit: LengthUnit) -> list[dict[str, Any]]:
    """What tables show: strategies as they were asked for, and behind `best_fit` the baseline where its windows are
    others."""
    rows = []
    for result in evaluation.results:
        rows.append(msgspec.to_builtins(result))
        if result.name == BEST_FIT.name and (row := baseline_row(evaluation)) and row["name"] != BEST_FIT.name:
            rows.append(row)
    return rows_in_unit(rows, unit)


def baseline_row(evaluation: Evaluation) -> dict[str, Any] | None:
    """`best_fit` in the windows that suit it best, its name with their tokens where they were not asked for."""
    if (found := evaluation.baseline) is None or found.window_tokens is None:
        return None
    as_asked = next(result for result in evaluation.results if result.name == BEST_FIT.name)
    row = msgspec.to_builtins(found)
    if found.step_time_s == as_asked.step_time_s:
        return row
    return row | {"name": f"{BEST_FIT.name} {format_power_of_two(found.window_tokens)}"}


def worst_line(worst: WorstBatch, memory_cap_bytes: int, unit: LengthUnit) -> str:
    """The most memory that was found to be needed, and by which documents."""
    longest = ", ".join(f"{length:,}" for length in worst.longest)
    more = ", ..." if worst.documents > len(worst.longest) else ""
    policies = ", ".join(f"{policy} {count:,}" for policy, count in worst.policies.items())
    verdict = "fits" if worst.fits else f"does not fit: {worst.why}"
    if worst.fitting_policy:
        verdict += f"; --policy {worst.fitting_policy} fits it"
    if worst.leaves_out_deferred:
        verdict += (
            f". Documents that {worst.strategy} has put off in earlier steps may come on top; they are not counted"
        )
    return in_unit(
        f"{worst.strategy}: the worst of {counted(worst.searched, 'global batch')} searched ({worst.drawn}: "
        f"{worst.documents:,} "
        f"documents of {longest}{more} tokens, {worst.tokens:,} in all) takes {format_bytes(worst.peak_memory_bytes)} "
        f"of {format_bytes(memory_cap_bytes)} with {policies} and {verdict}",
        unit,
    )


def rows_in_unit(rows: Sequence[dict[str, Any]], unit: LengthUnit) -> list[dict[str, Any]]:
    """Rows of the comparison whose sentences name the unit that was counted."""
    words = ("why", "note")
    return [row | {name: in_unit(row[name], unit) for name in words if name in row} for row in rows]


@contextmanager
def errors_in_unit(unit: LengthUnit) -> Iterator[None]:
    """Errors about lengths, in the unit that was counted."""
    try:
        yield
    except (ConfigError, DataError, InfeasiblePlanError) as error:
        if unit == "tokens":
            raise
        raise type(error)(in_unit(str(error), unit)) from error


def engine_layout(inputs: PlanInputs, engine: str) -> ParallelLayout | None:
    """The layout that is planned in where none is given: data parallel on an engine without a pipeline."""
    if inputs.layout is not None or engine_named(engine).schedules:
        return inputs.layout
    return even_layout(inputs.costs.model.num_layers, dp=inputs.machines.num_devices)


def require_engine(engine: str, inputs: PlanInputs, strategies: tuple[str, ...] | None, layout: ParallelLayout) -> None:
    """Refuse, before anything is planned, a layout or a strategy named that the engine cannot run."""
    for name in strategies or (BEST,):
        require_strategy(engine_named(engine), name, inputs.options, layout)
    require_heads(engine_named(engine), inputs.costs.model, layout)


def engine_evaluation(
    engine: str,
    inputs: PlanInputs,
    layout: ParallelLayout,
    batches: Sequence[SampledBatch],
    strategies: tuple[str, ...] | None,
) -> EngineEvaluation:
    """Every strategy that was asked for, on the engine."""
    profile, costs = engine_named(engine), inputs.costs
    shape = _shape(profile, inputs, layout)
    planner = EnginePlanner(profile, costs.model, costs.of(layout), layout, inputs.options, shape)
    with progress_bar() as on_progress:
        return evaluate_engine(planner, batches, strategies, on_progress=on_progress)


def engine_lines(found: EngineEvaluation, own: Evaluation, unit: LengthUnit) -> tuple[str, ...]:
    """What the engine's table does not say: the assumptions, the best of both, and what was left out."""
    lines = [
        f"{found.engine}: predicted from the cost model of Evenload's runtime and the engine's order, padding and "
        "waiting; not measured on GPUs, its memory is not predicted (docs/engines.md)"
    ]
    lines += [
        f"{found.engine}: Evenload's adapter does not run these plans: {one.why}. {one.instead}"
        for one in found.not_adapted
    ]
    by_name = {result.name: result for result in found.results}
    if found.best:
        best = by_name[found.best]
        line = f"{found.engine}: fastest {found.best}"
        line += f" (as {best.planned_by})" if best.planned_by else ""
        line += f", {format_seconds(best.mean_step_time_s or 0.0)} a step"
        if best.micro_batches_per_rank is not None:
            line += f", {counted(best.micro_batches_per_rank, 'micro-batch')} on every rank in every step"
        ours = next((result for result in own.results if result.name == own.best), None)
        if ours is not None and ours.mean_step_time_s is not None:
            line += f"; Evenload's own runtime: {ours.name}, {format_seconds(ours.mean_step_time_s)}"
        lines.append(line)
    lines += [f"left out on {found.engine}: {one.name}: {one.why}" for one in found.left_out]
    return tuple(in_unit(line, unit) for line in lines)


def engine_content(found: EngineEvaluation) -> dict[str, Any]:
    """`engine` of `--json`."""
    return {
        "name": found.engine,
        "title": found.title,
        "strategies": [msgspec.to_builtins(result) for result in found.results],
        "best": found.best or None,
        "left_out": [msgspec.to_builtins(one) for one in found.left_out],
        "not_adapted": [msgspec.to_builtins(one) for one in found.not_adapted],
    }


def _shape(profile: EngineProfile, inputs: PlanInputs, layout: ParallelLayout) -> StepShape:
    """As `PackedLoader` makes a step's micro-batches for the engine."""
    options = inputs.options
    return StepShape(
        micro_batches=options.micro_batches if profile.is_constant_in(layout) else None,
        pack_tokens=options.max_pack_tokens if profile.pads_in(layout) else None,
    )
