"""The ranked table of `evenload plan --search-layout`."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from evenload.plan.layout_search import LayoutResult
from evenload.report.units import format_bytes, format_percent, format_seconds

SHOWN = 12
"""Layouts that fit, and as many of those that do not; the JSON file has all."""


def layout_table(results: Sequence[LayoutResult]) -> Table:
    """The fastest layouts, then why others are out."""
    table = Table(box=box.SIMPLE, title="layouts, fastest first")
    for name in ("dp", "cp", "pp", "tp", "virtual"):
        table.add_column(name, justify="right")
    for name in ("step time", "of bound", "peak memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan, or why it is out")
    fitting = [result for result in results if result.feasible]
    others = [result for result in results if not result.feasible]
    for result in (*fitting[:SHOWN], *others[:SHOWN]):
        time_s, share, peak = result.mean_step_time_s, result.fraction_of_bound, result.peak_memory_bytes
        table.add_row(
            *(str(size) for size in result.layout.values()),
            format_seconds(time_s) if result.feasible and time_s is not None else "-",
            format_percent(share) if result.feasible and share is not None else "-",
            format_bytes(peak) if peak is not None else "-",
            _plan(result) if result.feasible else result.why,
        )
    hidden = max(0, len(fitting) - SHOWN), max(0, len(others) - SHOWN)
    if any(hidden):
        table.caption = f"not shown: {hidden[0]} that fit and {hidden[1]} that do not (--json lists all)"
    return table


def _plan(result: LayoutResult) -> str:
    """How it is cut and scheduled, and the layers of stages where they are not even."""
    if result.parallel_layout().is_even:
        return result.label
    return f"{result.label}; layers {'+'.join(map(str, result.stage_layers))}"
