"""What the terminal shows: the table of strategies, and one line a training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from evenload.report.columns import TEXT_COLUMNS, Column, format_cell, is_feasible, shown_columns
from evenload.report.metrics_file import MetricRow, MetricValue
from evenload.report.units import format_count, format_plain, format_seconds
from evenload.types.counted import counted
from evenload.types.length_unit import LengthUnit

# Left out first when the terminal is narrow. What is not here stays: the step time, the factor over best_fit, tokens/s.
_LEFT_OUT_FIRST = (
    "layout",
    "sharding",
    "cuts",
    "schedule",
    "num_packs_backward",
    "num_packs_forward",
    "plan_time_s",
    "imbalance_dp",
    "imbalance_backward",
    "imbalance_forward",
    "time_split",
    "fraction_of_layout_bound",
    "mfu",
    "peak_host_bytes_per_node",
    "bubble_fraction",
    "dropped_tokens",
    "step_time_interval_s",
    "cap_violations",
    "peak_memory_bytes",
    "deferred_tokens",
    "fraction_of_bound",
)
_NEVER_CONSTANT = frozenset(
    {
        *("mean_step_time_s", "measured_step_time_s", "speedup_over_baseline"),
        *("tokens_per_s_per_device", "measured_tokens_per_s", "plan_time_s"),
    }
)
"""Keys of what is compared: equal values are a result and stay a column. The time to plan is no property of a plan."""
_MUCH_WAITING = 0.05
"""Of a step's time."""


@dataclass(frozen=True)
class ComparisonTable:
    """A rich renderable: strategies side by side, the best marked, as many columns as the width takes.

    What is the same in all rows stands in a line above the table. A cut number is a wrong number, so columns that do
    not fit are left out whole and named below the table; then those that cannot run, with the reason.
    """

    rows: Sequence[Mapping[str, object]]
    best: str = ""
    title: str = ""
    unit: LengthUnit = "tokens"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        feasible = [row for row in self.rows if is_feasible(row)]
        columns, constants = _without_constants(feasible, shown_columns(feasible, self.unit))
        if constants:
            yield Text(f"the same in all rows: {', '.join(constants)}")
        left_out: list[Column] = []
        for key in _LEFT_OUT_FIRST:
            table = self._table(feasible, columns)
            if Measurement.get(console, options.update(max_width=10_000), table).maximum <= options.max_width:
                break
            left_out += [column for column in columns if column.key == key]
            columns = [column for column in columns if column.key != key]
        yield self._table(feasible, columns)
        if left_out:
            yield Text(f"left out for width: {', '.join(_on_one_line(column) for column in left_out)}")
        for row in self.rows:
            if not is_feasible(row):
                yield Text(f"{row['name']}: not feasible: {row.get('why') or 'no reason given'}")

    def _table(self, rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> Table:
        title = Text(self.title) if self.title else None
        table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("strategy", no_wrap=True)
        for column in columns:
            table.add_column(column.heading, justify="left" if column.key in TEXT_COLUMNS else "right", no_wrap=True)
        for row in rows:
            is_best = row["name"] == self.best
            name = Text(f"{'▶' if is_best else ' '} {row['name']}")
            cells = [Text(format_cell(column, row)) for column in columns]
            table.add_row(name, *cells, style="bold green" if is_best else None)
        return table


def _without_constants(
    rows: Sequence[Mapping[str, object]], columns: Sequence[Column]
) -> tuple[list[Column], list[str]]:
    """Columns in which rows differ, and what the others hold in words; one row differs from nothing."""
    kept, constants = [], []
    for column in columns:
        cells = {format_cell(column, row) for row in rows}
        if len(rows) > 1 and len(cells) == 1 and column.key not in _NEVER_CONSTANT:
            constants.append(f"{_on_one_line(column)} {cells.pop()}")
        else:
            kept.append(column)
    return kept, constants


def _on_one_line(column: Column) -> str:
    return column.heading.replace("\n", " ")


def step_line(row: MetricRow) -> str:
    """One line about one step, within 100 columns where nothing is unusual: what was learnt and how fast. Tokens are
    real ones, without padding; a dash stands for what is not known. What waiting for data took is told where it is much
    of the step, deferred documents where there are any."""
    step_s, wait_s = _number(row["step_time_s"]), _number(row["data_wait_s"])
    parts = [
        f"step {row['step']}",
        f"loss {format_plain(_number(row['loss']), '.4f')}",
        f"grad {format_plain(_number(row['grad_norm']), '.3g')}",
        f"lr {format_plain(_number(row['lr']), '.3g')}",
        f"{format_count(_number(row['tokens_per_s']))} tokens/s",
        f"{format_seconds(step_s)} (predicted {format_seconds(_number(row['predicted_step_time_s']))})",
    ]
    if wait_s and step_s and wait_s > _MUCH_WAITING * step_s:
        parts.append(f"waited {format_seconds(wait_s)} for data")
    if row["deferred_documents"]:
        parts.append(f"{counted(int(row['deferred_documents']), 'document')} deferred")
    return " | ".join(parts)


def progress_text(row: MetricRow) -> str:
    """What a line that moves says of the last step, in few columns."""
    loss, speed = format_plain(_number(row["loss"]), ".4f"), format_count(_number(row["tokens_per_s"]))
    return f"loss {loss} | {speed} tokens/s"


def _number(value: MetricValue) -> float | None:
    return None if value is None else float(value)
