"""The layout that `evenload plan` plans in: given, a run's, the default one or the best of a search."""

from collections.abc import Sequence

from rich.console import Console

from evenload.cli.layout_table import layout_table
from evenload.cli.plan_inputs import PlanInputs
from evenload.cli.progress_bar import progress_bar
from evenload.errors import InfeasiblePlanError
from evenload.explore.default_layout import default_layout
from evenload.explore.fitting_layouts import fitting_layouts
from evenload.explore.layout_search import LayoutResult, search_layouts
from evenload.explore.sampled_batches import SampledBatch
from evenload.explore.stage_layers import balanced_layout
from evenload.plan.strategies.auto import AUTO
from evenload.report.units import format_seconds
from evenload.types.layout import ParallelLayout

_NAMED = 3
"""Layouts that a message names."""


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


def searched_layouts(
    inputs: PlanInputs, batches: Sequence[SampledBatch], asked: tuple[str, ...] | None, console: Console
) -> tuple[LayoutResult, ...]:
    """Every layout of the cluster, ranked and shown."""
    with progress_bar() as on_progress:
        layouts = search_layouts(
            inputs.costs.model,
            inputs.machines,
            batches,
            inputs.costs.of,
            strategy=_search_strategy(asked),
            options=inputs.options,
            on_progress=on_progress,
        )
    console.print(layout_table(layouts, console.width))
    if not layouts[0].feasible:
        raise InfeasiblePlanError(
            f"no layout of {inputs.cluster_name} fits; the closest, {_option(layouts[0])}: {layouts[0].why}"
        )
    return layouts


def layouts_that_fit(inputs: PlanInputs, batches: Sequence[SampledBatch], asked: tuple[str, ...] | None) -> str:
    """A sentence that names layouts of the cluster that hold the first batch, after a short look at some."""
    with progress_bar() as on_progress:
        found = fitting_layouts(
            inputs.costs.model,
            inputs.machines,
            batches[0],
            inputs.costs.of,
            strategy=_search_strategy(asked),
            options=inputs.options,
            on_progress=on_progress,
        )
    tried = f"{found.num_tried} of the cluster's {found.num_all} layouts tried on the first batch"
    if not found.layouts:
        return f"no layout was found that fits ({tried}); --search-layout tries all of them"
    named = ", ".join(
        f"--layout {_option(result)} ({format_seconds(result.mean_step_time_s)} a step)"
        for result in found.layouts[:_NAMED]
    )
    return f"these fit by prediction ({tried}): {named}; --search-layout ranks all"


def _search_strategy(asked: tuple[str, ...] | None) -> str:
    return asked[0] if asked is not None and len(asked) == 1 else AUTO.name


def _option(result: LayoutResult) -> str:
    """A layout as --layout takes it."""
    return ",".join(f"{axis}={size}" for axis, size in result.layout.items() if size > 1 or axis == "dp")
