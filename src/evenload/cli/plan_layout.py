"""The layout that `evenload plan` plans in: given, a run's, the default one or the best of a search."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from evenload.cli.plan_inputs import PlanInputs
from evenload.cli.progress_bar import progress_bar
from evenload.errors import InfeasiblePlanError
from evenload.explore.default_layout import default_layout
from evenload.explore.fitting_layouts import fitting_layouts
from evenload.explore.layout_search import LayoutResult, search_layouts
from evenload.explore.sampled_batches import SampledBatch
from evenload.explore.stage_layers import balanced_layout
from evenload.plan.strategies.auto import AUTO
from evenload.report.units import format_percent, format_seconds
from evenload.types.layout import ParallelLayout
from evenload.types.scaled_units import format_bytes

_NAMED = 3
"""Layouts that a message names."""
_SHOWN = 12
"""Layouts in the table that fit, and as many of those that do not; the JSON file has all."""
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
    console.print(_layout_table(layouts, console.width))
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


def _layout_table(results: Sequence[LayoutResult], width: int) -> Table:
    """The fastest layouts, then why others are out; `width` columns wide."""
    table = Table(box=box.SIMPLE, title="layouts, fastest first")
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
