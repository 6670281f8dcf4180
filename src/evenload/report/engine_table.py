"""What the terminal shows of an engine: what each strategy takes on it, beside Evenload's runtime on the same plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from evenload.report.units import format_count, format_percent, format_seconds

_COLUMNS = (
    ("mean_step_time_s", "step\npredicted", format_seconds),
    ("own_step_time_s", "same plan on\nour runtime", format_seconds),
    ("end_s", "sums, update,\ngather", format_seconds),
    ("idle_fraction", "idle", format_percent),
    ("padding_fraction", "padding", format_percent),
    ("micro_batches", "micro-\nbatches", format_count),
    ("empty_micro_batches", "of these\nempty", format_count),
    ("max_padded_tokens", "longest", format_count),
)


@dataclass(frozen=True)
class EngineTable:
    """A rich renderable: strategies on one engine, the fastest marked, then those that could not be planned.

    Args:
        rows: `engines.evaluate.EngineResult` as builtins.
    """

    rows: Sequence[Mapping[str, Any]]
    best: str
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(
            title=Text(self.title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        table.add_column("strategy", no_wrap=True)
        for _, heading, _ in _COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in (row for row in self.rows if not row["why"]):
            is_best = row["name"] == self.best
            by = f" ({row['planned_by']})" if row["planned_by"] else ""
            cells = [Text(format(row[key])) for key, _, format in _COLUMNS]
            name = Text(f"{'▶' if is_best else ' '} {row['name']}{by}")
            table.add_row(name, *cells, style="bold green" if is_best else None)
        yield table
        for row in self.rows:
            if row["why"]:
                yield Text(f"{row['name']}: not planned: {row['why']}")
