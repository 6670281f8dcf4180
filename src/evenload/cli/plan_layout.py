"""The layout that `evenload plan` plans in: given, a run's, the default one or the best of a search."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from evenload.cli.options import progress_bar
from evenload.cli.plan_inputs import PlanInputs
from evenload.errors import InfeasiblePlanError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress
from evenload.explore.evaluate import StrategyPlanners
from evenload.explore.layout_search import LARGE_CLUSTER, LayoutResult, LayoutSearch, StrategyLayouts, fair_planners
from evenload.explore.stage_layers import balanced_layout, default_layout
from evenload.plan.layouts.flex_planner import FlexPlanner
from evenload.plan.strategies.auto import AUTO
from evenload.plan.strategies.baselines import BEST_FIT
from evenload.report.units import format_percent, format_seconds
from evenload.types.layout import ParallelLayout
from evenload.types.text import format_bytes

_NAMED = 3
"""Layouts that a message names."""
_SHOWN = 12
"""Layouts in the table that fit, and as many of those that do not; the JSON file has all."""
_COUNTS = ("planned", "too_large", "ruled_out", "not_looked_at")
"""Of a strategy's layouts, what became of them."""
_NUMBERS_WIDTH, _MIN_PLAN_WIDTH = 70, 20
"""Columns of the terminal that sizes, times and memory take, and at least the rest."""


def planned_in(inputs: PlanInputs, batches: Sequence[SampledBatch], asked: tuple[str, ...] | None) -> ParallelLayout:
    """The layout without a search, layers of stages by cost unless a run says them; an error names layouts that fit."""
    spec, costs = inputs.costs.model, inputs.costs
    try:
        sizes = inputs.layout or default_layout(spec, inputs.machines)
    except InfeasiblePlanError as error:
        raise InfeasiblePlanError(f"{error}; {layouts_that_fit(inputs, batches, asked)}") from error
    if inputs.keeps_stages:
        return sizes
    return balanced_layout(
        spec,
        costs.of(sizes),
        sizes,
        [document.num_tokens for batch in batches for document in batch.documents],
        num_steps=len(batches),
        memory_bytes=inputs.memory_cap_bytes,
    )


@dataclass(frozen=True)
class SearchedLayouts:
    """What a search found for every strategy, and how long it might take."""

    found: tuple[StrategyLayouts, ...]
    limit_s: float

    @property
    def fastest(self) -> StrategyLayouts:
        """The strategy with the fastest layout."""
        return min(self.found, key=lambda one: (not one.best.feasible, one.best.mean_step_time_s or 0.0))

    def of(self, strategy: str) -> StrategyLayouts:
        return next(one for one in self.found if one.strategy == strategy)

    def lines(self) -> tuple[str, ...]:
        """Every strategy's layout, and what was looked at."""
        named = "; ".join(
            f"{one.strategy} {option_of(one.best)} ({format_seconds(one.best.mean_step_time_s)})"
            if one.best.feasible
            else f"{one.strategy} none"
            for one in self.found
        )
        planned, too_large, ruled_out = (sum(getattr(one, name) for one in self.found) for name in _COUNTS[:3])
        lines = [
            f"layout of each strategy: {named}",
            f"layouts planned: {planned}; too large in weights and optimizer alone: {too_large}; not needed, because "
            f"no plan in them can be among the best: {ruled_out}",
        ]
        late = [f"{one.strategy} {one.not_looked_at} of {len(one.layouts)}" for one in self.found if one.not_looked_at]
        if late:
            lines.append(
                f"not looked at, because the {self.limit_s:g} s of --search-seconds were up: {', '.join(late)}; more "
                "time may find faster layouts"
            )
        if any(one.best.stride > 1 for one in self.found):
            strides = ", ".join(f"{one.strategy} {one.best.stride}" for one in self.found)
            lines.append(
                f"estimates: more than {LARGE_CLUSTER} devices are judged on a part, every so many-th replica and "
                f"document ({strides}); --layout {option_of(self.fastest.best)} plans the whole"
            )
        return tuple(lines)

    def content(self) -> dict[str, Any]:
        """`search` of `--json`."""
        return {
            "limit_s": self.limit_s,
            "strategies": {
                one.strategy: {
                    **{name: getattr(one, name) for name in _COUNTS},
                    "layouts": [msgspec.to_builtins(result) for result in one.layouts],
                }
                for one in self.found
            },
        }


def searched_layouts(
    inputs: PlanInputs,
    batches: Sequence[SampledBatch],
    strategies: tuple[str, ...],
    console: Console,
    limit_s: float,
) -> SearchedLayouts:
    """Every strategy's layouts, ranked; those of the fastest strategy are shown."""
    with progress_bar() as on_progress:
        found = _layout_search(inputs, batches, on_progress).strategies(strategies, limit_s=limit_s)
    searched = SearchedLayouts(found, limit_s)
    fastest = searched.fastest
    console.print(_layout_table(fastest.layouts, console.width, fastest.strategy))
    for line in searched.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not fastest.best.feasible:
        raise InfeasiblePlanError(
            f"no layout of {inputs.cluster_name} fits; the closest, {option_of(fastest.best)}: {fastest.best.why}"
        )
    return searched


def planners_of_search(
    searched: SearchedLayouts, inputs: PlanInputs, batches: Sequence[SampledBatch]
) -> StrategyPlanners:
    """Every strategy in its own best layout; `best_fit` in other windows in that which is best for it then."""
    search = _layout_search(inputs, batches)

    def planners_of(result: LayoutResult) -> StrategyPlanners:
        found = search.planners(result)
        if found.stands_for is not None:
            return found  # A part has no other layouts to change to.
        return replace(found, flexible=FlexPlanner(found.planner, inputs.costs.of, layouts=inputs.layouts))

    own = {one.strategy: planners_of(one.best) for one in searched.found}
    baseline = None
    if BEST_FIT.name in own:
        baseline = fair_planners(searched.of(BEST_FIT.name).layouts, planners_of, batches)
    return replace(own[searched.fastest.strategy], own=own, baseline=baseline)


def _layout_search(
    inputs: PlanInputs, batches: Sequence[SampledBatch], on_progress: OnProgress = no_progress
) -> LayoutSearch:
    return LayoutSearch(
        model=inputs.costs.model,
        cluster=inputs.machines,
        batches=batches,
        coefficients_of=inputs.costs.of,
        options=inputs.options,
        memory_bytes=inputs.memory_cap_bytes,
        host=inputs.host,
        on_progress=on_progress,
    )


def layouts_that_fit(inputs: PlanInputs, batches: Sequence[SampledBatch], asked: tuple[str, ...] | None) -> str:
    """A sentence that names layouts of the cluster that hold the first batch, after a short look at some."""
    with progress_bar() as on_progress:
        found = _layout_search(inputs, batches, on_progress).fitting(_search_strategy(asked))
    if not found.num_tried:
        return (
            f"in all {found.num_all} layouts of the cluster weights, gradients and optimizer alone are more than a "
            "device holds; take more devices, or devices with more memory"
        )
    tried = f"{found.num_tried} of the cluster's {found.num_all} layouts tried on the first batch"
    if not found.layouts:
        return f"no layout was found that fits ({tried}); --search-layout tries all of them"
    named = ", ".join(
        f"--layout {option_of(result)} ({format_seconds(result.mean_step_time_s)} a step)"
        for result in found.layouts[:_NAMED]
    )
    return f"these fit by prediction ({tried}): {named}; --search-layout ranks all"


def _search_strategy(asked: tuple[str, ...] | None) -> str:
    return asked[0] if asked is not None and len(asked) == 1 else AUTO.name


def option_of(result: LayoutResult) -> str:
    """A layout as --layout takes it."""
    return ",".join(f"{axis}={size}" for axis, size in result.layout.items() if size > 1 or axis == "dp")


def _layout_table(results: Sequence[LayoutResult], width: int, strategy: str) -> Table:
    """The fastest layouts of a strategy, then why others are out; `width` columns wide."""
    table = Table(box=box.SIMPLE, title=f"layouts, fastest first, under {strategy}")
    for name in ("dp", "cp", "pp", "tp", "virtual"):
        table.add_column(name, justify="right")
    for name in ("step time", "of bound", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    # One line a layout: in a narrow terminal the last column is cut off, --json has it whole.
    room = max(_MIN_PLAN_WIDTH, width - _NUMBERS_WIDTH)
    table.add_column("plan, or why it is out", no_wrap=True, overflow="ellipsis", max_width=room)
    fitting = [result for result in results if result.feasible]
    others = [result for result in results if not result.feasible]
    most_batches = max((result.num_batches for result in results), default=0)
    for result in (*fitting[:_SHOWN], *others[:_SHOWN]):
        star = "*" if result.num_batches < most_batches else ""
        star += "~" if result.stride > 1 else ""
        time_s, share, peak = result.mean_step_time_s, result.fraction_of_bound, result.peak_memory_bytes
        table.add_row(
            *(str(size) for size in result.layout.values()),
            format_seconds(time_s) + star if result.feasible and time_s is not None else "-",
            format_percent(share) if result.feasible and share is not None else "-",
            format_bytes(peak) if peak is not None else "-",
            _plan(result) if result.feasible else result.why,
        )
    notes = []
    if any(result.num_batches < most_batches for result in fitting[:_SHOWN]):
        notes.append("* of the first batch only, where others were faster")
    if any(result.stride > 1 for result in fitting[:_SHOWN]):
        notes.append("~ of a part of the replicas and documents")
    hidden = max(0, len(fitting) - _SHOWN), max(0, len(others) - _SHOWN)
    if any(hidden):
        notes.append(f"not shown: {hidden[0]} that fit and {hidden[1]} that do not (--json lists all)")
    table.caption = "\n".join(notes) or None
    return table


def _plan(result: LayoutResult) -> str:
    """How it is cut and scheduled, and the layers of stages where they are not even."""
    if result.parallel_layout().is_even:
        return result.label
    return f"{result.label}; layers {'+'.join(map(str, result.stage_layers))}"
