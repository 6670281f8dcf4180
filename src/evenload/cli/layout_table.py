"""The ranked table of `evenload plan --search-layout`."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from evenload.explore.layout_search import LayoutResult
from evenload.report.units import format_percent, format_seconds
from evenload.types.scaled_units import format_bytes

SHOWN = 12
"""Layouts that fit, and as many of those that do not; the JSON file has all."""

NUMBERS_WIDTH = 70
"""Columns of the terminal that sizes, times and memory take."""
MIN_PLAN_WIDTH = 20


def layout_table(results: Sequence[LayoutResult], width: int) -> Table:
    """The fastest layouts, then why others are out; `width` columns wide."""
    table = Table(box=box.SIMPLE, title="layouts, fastest first")
    for name in ("dp", "cp", "pp", "tp", "virtual"):
        table.add_column(name, justify="right")
    for name in ("step time", "of bound", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    # One line a layout: in a narrow terminal the last column is cut off, --json has it whole.
    room = max(MIN_PLAN_WIDTH, width - NUMBERS_WIDTH)
    table.add_column("plan, or why it is out", no_wrap=True, overflow="ellipsis", max_width=room)
    fitting = [result for result in results if result.feasible]
    others = [result for result in results if not result.feasible]
    most_batches = max((result.num_batches for result in results), default=0)
    for result in (*fitting[:SHOWN], *others[:SHOWN]):
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
    if any(result.num_batches < most_batches for result in fitting[:SHOWN]):
        notes.append("* of the first batch only, where others were faster")
    hidden = max(0, len(fitting) - SHOWN), max(0, len(others) - SHOWN)
    if any(hidden):
        notes.append(f"not shown: {hidden[0]} that fit and {hidden[1]} that do not (--json lists all)")
    table.caption = "\n".join(notes) or None
    return table


def _plan(result: LayoutResult) -> str:
    """How it is cut and scheduled, and the layers of stages where they are not even."""
    if result.parallel_layout().is_even:
        return result.label
    return f"{result.label}; layers {'+'.join(map(str, result.stage_layers))}"
