"""`find_plans`: all of `evenload plan` but its output, for the command and for `evenload.plan`."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from evenload.cli.length_source import LengthSource, length_source, unit_line
from evenload.cli.output_file import shown_name
from evenload.cli.plan_arguments import DEFAULT_SEARCH_S, PlanArguments
from evenload.cli.plan_engine import engine_evaluation, engine_layout, require_engine
from evenload.cli.plan_inputs import PlanInputs, plan_inputs
from evenload.cli.plan_layout import (
    SearchedLayouts,
    layouts_that_fit,
    option_of,
    planned_in,
    planners_of_search,
    searched_layouts,
)
from evenload.cli.plan_lines import comparison_rows, errors_in_unit, first_line, headline_line, host_line, inputs_said
from evenload.cli.plan_strategies import asked_strategies, chosen_strategies
from evenload.cli.progress_bar import progress_bar
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.explore.coarse_batch import LARGE_CLUSTER
from evenload.explore.evaluate import Evaluation, StrategyPlanners, evaluate_strategies
from evenload.explore.headline import headline
from evenload.explore.layout_search import LayoutResult
from evenload.explore.prediction_interval import PredictionInterval, prediction_interval
from evenload.explore.sampled_batches import SampledBatch
from evenload.explore.worst_batch import WorstBatch, find_worst
from evenload.integrations.evaluate import EngineEvaluation
from evenload.plan.planner import StepPlanner
from evenload.plan.reconfiguration.flex_planner import FlexPlanner
from evenload.plan.strategies.registry import STRATEGIES
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.types.layout import ParallelLayout
from evenload.types.length_unit import LengthUnit, in_unit


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
