"""Show tables in the terminal: strategies side by side, engines, decisions about layouts; and a line for each step.

The page shares the columns of the comparison, whose keys are those of `evenload plan --json`, and more of trained runs.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from evenload.report.run_files import MetricRow
from evenload.types.run import LayoutDecision
from evenload.types.text import (
    MISSING,
    LengthUnit,
    counted,
    format_bytes,
    format_count,
    format_interval,
    format_layout,
    format_percent,
    format_plain,
    format_ratio,
    format_seconds,
    in_unit,
)
from evenload.types.timeline import TimeSplit

TEXT_COLUMNS = ("time_split", "cuts", "schedule", "sharding", "layout")
"""Keys of columns of text, which are aligned left."""


class Column(NamedTuple):
    """The key of a column's values, its heading, how to print a value, and what it means."""

    key: str
    heading: str
    format: Callable[[Any], str]
    meaning: str


def format_losses(time_split: object) -> str:
    """Format the two largest losses of a `TimeSplit` (as builtins) and their shares: "uneven replicas 12.0 %"."""
    split = msgspec.convert(time_split, TimeSplit)
    largest = sorted(list(split.groups().items())[1:], key=lambda part: -part[1])[:2]
    shares = [(label, seconds / (split.total_s() or 1.0)) for label, seconds in largest]
    return ", ".join(f"{label} {format_percent(share)}" for label, share in shares if share > 0.001) or MISSING


COLUMNS = (
    Column("measured_step_time_s", "step\nmeasured", format_seconds, "median measured seconds of an optimizer step"),
    Column("mean_step_time_s", "step\npredicted", format_seconds, "mean simulated seconds of an optimizer step"),
    Column("step_time_interval_s", "90 % of\nsteps", format_interval, "where nine of ten measured step times lie"),
    Column("fraction_of_bound", "of bound", format_percent, "useful work at the cost model's rates over the step time"),
    Column("fraction_of_layout_bound", "of layout\nbound", format_percent, "least time of any plan in this layout"),
    Column("mfu", "MFU", format_percent, "model FLOPs at the devices' peak over the predicted step time"),
    Column("speedup_over_baseline", "vs\nbest_fit", "{:.2f}×".format, "speed relative to best_fit in its best windows"),
    Column("tokens_per_s_per_device", "tokens/s\ndevice", format_count, "real tokens a second and device, predicted"),
    Column("measured_tokens_per_s", "tokens/s\nmeasured", format_count, "real tokens a second, all devices"),
    Column("bubble_fraction", "bubble", format_percent, "share of rank time in which nothing is computed"),
    Column("imbalance_forward", "fwd\nmax/mean", format_ratio, "slowest forward pack over the mean"),
    Column("imbalance_backward", "bwd\nmax/mean", format_ratio, "slowest backward pack over the mean"),
    Column("imbalance_dp", "dp\nmax/mean", format_ratio, "slowest replica over the mean"),
    Column("peak_memory_bytes", "memory\npeak", format_bytes, "most bytes any device holds at any time"),
    Column("peak_host_bytes_per_node", "host\na node", format_bytes, "host memory of offloaded activations"),
    Column("cap_violations", "over\ncap", format_count, "packs over the memory cap"),
    Column("num_packs_forward", "packs\nfwd", format_count, "forward packs of a step"),
    Column("num_packs_backward", "packs\nbwd", format_count, "backward packs of a step"),
    Column("deferred_tokens", "tokens\ndeferred", format_count, "tokens moved to a later step"),
    Column("dropped_tokens", "tokens\ndropped", format_count, "tokens never trained"),
    Column("plan_time_s", "plan\ntime", format_seconds, "seconds to plan a step"),
    Column("time_split", "lost to", format_losses, "the two largest losses, share of the step"),
    Column("cuts", "cuts", str, "whole documents, or slices: the same forward and backward (symmetric), or not"),
    Column("schedule", "schedule", str, "in which order pipeline ranks run packs (plan.options.schedule)"),
    Column("sharding", "shared\nby", str, "how context-parallel ranks share packs (plan.options.cp_sharding)"),
    Column("layout", "layout", format_layout, "sizes of the parallel dimensions"),
)
_SHOWN_ONLY_IF_NOT_ZERO = ("cap_violations", "deferred_tokens", "dropped_tokens", "peak_host_bytes_per_node")


def shown_columns(rows: Iterable[Mapping[str, object]], unit: LengthUnit = "tokens") -> tuple[Column, ...]:
    """Return the columns for which any row has a value; counts of bad things only when one is not zero."""
    rows, shown = tuple(rows), []
    for column in COLUMNS:
        hidden = (None, "", 0) if column.key in _SHOWN_ONLY_IF_NOT_ZERO else (None, "")
        if any(row.get(column.key) not in hidden for row in rows):
            heading, meaning = in_unit(column.heading, unit), in_unit(column.meaning, unit)
            shown.append(column._replace(heading=heading, meaning=meaning))
    return tuple(shown)


def format_cell(column: Column, row: Mapping[str, object]) -> str:
    """Format a row's value in a column; a dash when it has none."""
    value = row.get(column.key)
    return MISSING if value in (None, "") else column.format(value)


def is_feasible(row: Mapping[str, object]) -> bool:
    """Whether a strategy can run; rows of trained runs, which did, have no such key."""
    return row.get("feasible", True) is not False


FIRST_COLUMNS = (
    *("mean_step_time_s", "measured_step_time_s", "speedup_over_baseline", "tokens_per_s_per_device"),
    *("measured_tokens_per_s", "peak_memory_bytes", "step_time_interval_s", "fraction_of_bound", "time_split"),
    *("deferred_tokens", "cap_violations", "dropped_tokens"),
)
"""Keys of the columns that matter most, in order; a terminal and a page show the first that have values."""
MOST_COLUMNS, MOST_ROWS = 7, 5
"""Of a table that is not asked for as a whole, besides the names."""
_MUCH_WAITING = 0.05
"""Of a step's time."""


def first_rows(rows: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return the first rows, and in the place of the last of them the baseline where that comes later."""
    first, later = list(rows[:MOST_ROWS]), rows[MOST_ROWS:]
    baselines = [row for row in later if row.get("speedup_over_baseline") == 1.0]
    return [*first[:-1], baselines[0]] if baselines else first


def first_columns(rows: Iterable[Mapping[str, object]], unit: LengthUnit, most: int = MOST_COLUMNS) -> list[Column]:
    """Return the columns that matter most, at most so many, in their order."""
    columns = [column for column in shown_columns(rows, unit) if column.key in FIRST_COLUMNS]
    first = sorted(columns, key=lambda column: FIRST_COLUMNS.index(column.key))[:most]
    return [column for column in columns if column in first]


def bare_table(title: str, first: str, *headings: str, left: Sequence[str] = (), is_narrow: bool = False) -> Table:
    """Make a table without rules between columns, of which the first and `left` are aligned left."""
    shown = Text(title) if title else None
    style: dict[str, Any] = {"header_style": "bold", "box": box.SIMPLE_HEAD, "collapse_padding": is_narrow}
    table = Table(title=shown, title_justify="left", pad_edge=False, **style)
    for heading in (first, *headings):
        table.add_column(heading, justify="left" if heading in (first, *left) else "right", no_wrap=True)
    return table


def add_strategy(table: Table, name: object, best: Sequence[str], cells: Sequence[str], remark: str = "") -> None:
    is_best = name in best
    shown = f"{'▶' if is_best else ' '} {name}{remark}"
    table.add_row(*map(Text, (shown, *cells)), style="bold green" if is_best else None)


@dataclass(frozen=True)
class ComparisonTable:
    """Renders strategies side by side, the `best` marked; below, what is left out, and why strategies cannot run.

    Args:
        has_all_rows: false leaves slower strategies out, and those that cannot run where others can.
        has_all_columns: false shows `MOST_COLUMNS`.
    """

    rows: Sequence[Mapping[str, object]]
    best: Sequence[str] = ()
    unit: LengthUnit = "tokens"
    has_all_rows: bool = True
    has_all_columns: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        feasible = [row for row in self.rows if is_feasible(row)]
        refused = [row for row in self.rows if not is_feasible(row)]
        shown = feasible if self.has_all_rows else first_rows(feasible)
        columns = first_columns(shown, self.unit, len(COLUMNS) if self.has_all_columns else MOST_COLUMNS)
        table, left_out = self._table(shown, columns), []
        while columns and Measurement.get(console, options.update(max_width=10_000), table).maximum > options.max_width:
            last = max(columns, key=lambda column: FIRST_COLUMNS.index(column.key))
            columns.remove(last)
            left_out.append(last.heading.replace("\n", " "))
            table = self._table(shown, columns)
        if shown:
            yield table
        if left_out:
            yield Text(f"left out for width: {', '.join(left_out)}")
        others = len(feasible) - len(shown)
        hidden = 0 if self.has_all_rows else len(refused) - (not feasible)
        if others or hidden:
            parts = [f"{others} more"] * bool(others) + [f"{hidden} that cannot run"] * bool(hidden)
            yield Text(f"--details shows {' and '.join(parts)}")
        if self.has_all_rows or not feasible:
            for row in refused if self.has_all_rows else refused[:1]:
                yield Text(f"{row['name']}: not feasible: {row.get('why') or 'no reason given'}")

    def _table(self, rows: Sequence[Mapping[str, object]], columns: Sequence[Column]) -> Table:
        left = [column.heading for column in columns if column.key in TEXT_COLUMNS]
        table = bare_table("", "strategy", *(column.heading for column in columns), left=left)
        for row in rows:
            add_strategy(table, row["name"], self.best, [format_cell(column, row) for column in columns])
        return table


def step_line(row: MetricRow) -> str:
    """Return a line about one step, within 100 columns where nothing is unusual. Tokens are without padding; those of
    all sequences where some share prefixes, long waits for data and deferred documents are named."""
    step_s, wait_s, of_paths = row["step_time_s"], row["data_wait_s"], ""
    if (row["tree_token_ratio"] or 1) > 1:
        of_paths = f" ({format_count(row['path_tokens_per_s'])} of all sequences)"
    parts = [
        f"step {row['step']}",
        f"loss {format_plain(row['loss'], '.4f')}",
        f"grad {format_plain(row['grad_norm'], '.3g')}",
        f"lr {format_plain(row['lr'], '.3g')}",
        f"{format_count(row['tokens_per_s'])} tokens/s{of_paths}",
        f"{format_seconds(step_s)} (predicted {format_seconds(row['predicted_step_time_s'])})",
    ]
    if wait_s and step_s and wait_s > _MUCH_WAITING * step_s:
        parts.append(f"waited {format_seconds(wait_s)} for data")
    if row["deferred_documents"]:
        parts.append(f"{counted(int(row['deferred_documents']), 'document')} deferred")
    return " | ".join(parts)


def progress_text(row: MetricRow) -> str:
    """Return the loss and speed of the last step for a progress line."""
    loss, speed = format_plain(row["loss"], ".4f"), format_count(row["tokens_per_s"])
    return f"loss {loss} | {speed} tokens/s"


_ENGINE_COLUMNS = (
    ("mean_step_time_s", "step\npredicted", format_seconds),
    ("own_step_time_s", "same plan on\nour runtime", format_seconds),
    ("end_s", "sums, update,\ngather", format_seconds),
    ("idle_fraction", "idle", format_percent),
    ("padding_fraction", "padding", format_percent),
    ("micro_batches", "micro-\nbatches", format_count),
    ("empty_micro_batches", "of these\nempty", format_count),
    ("max_padded_tokens", "longest", format_count),
)


def engine_table(rows: Iterable[Mapping[str, Any]], best: str, title: str) -> Table:
    """Make a table of strategies on one engine (rows of `EngineResult` as builtins, without those that could not be
    planned), the fastest marked."""
    table = bare_table(title, "strategy", *(heading for _, heading, _ in _ENGINE_COLUMNS))
    for row in rows:
        cells = [format(row[key]) for key, _, format in _ENGINE_COLUMNS]
        add_strategy(table, row["name"], (best,), cells, f" ({row['planned_by']})" if row["planned_by"] else "")
    return table


def format_conditions(decision: LayoutDecision) -> str:
    """Return the letters of the conditions that hold, a dot for each other: "A · C ·"."""
    held = (decision.fits, decision.switching_is_slower, decision.fits_saving, decision.switching_is_slower_than_saving)
    return " ".join(letter if holds else "·" for letter, holds in zip("ABCD", held, strict=True))


def format_action(decision: LayoutDecision) -> str:
    """Return the case of FlexPipe's Fig. 7 and the action: "④ shrink"."""
    waits = ", waits" if decision.is_patient or decision.later_steps else ""
    return f"{'①②③④'[decision.case - 1]} {decision.action}{waits}"


def format_predicted(seconds: float | None) -> str:
    """Format predicted seconds, or that the batch does not fit."""
    return "does not fit" if seconds is None else format_seconds(seconds)


LAYOUT_HEADINGS = ("step", "layout", "A B C D", "action", "T(keep)", "T(save)", "T(new)", "T(switch)", "why")
READ_LAYOUTS = (
    "A the layout holds the batch, B switching is slower, C it holds it by recomputing or offloading, D switching is "
    "slower than that; ① kept ② kept, saving memory ③ switched to fit ④ switched to be faster; T(save) by documents, "
    "or (layers) by layers that recompute for all of them; seconds are predicted, over the known steps"
)


def layout_rows(decisions: Iterable[LayoutDecision]) -> Iterator[tuple[str, ...]]:
    """Yield rows of `LAYOUT_HEADINGS`; neighbours of one action and conditions are one, with the last one's seconds."""

    def kind(decision: LayoutDecision) -> object:
        apart = decision.step if decision.is_switch else None
        return decision.layout, format_conditions(decision), format_action(decision), apart

    for _, rows in itertools.groupby(decisions, kind):
        first, *rest = rows
        last = rest[-1] if rest else first
        steps = f"{first.step}" if first is last else f"{first.step}-{last.step}"
        new, switch = (format_predicted(last.new_s), format_seconds(last.switch_s)) if last.other else ("", "")
        if last.other and last.measured_switch_s is not None:
            switch += f" ({format_seconds(last.measured_switch_s)} measured)"
        decided = last.layout, format_conditions(last), format_action(last)
        yield steps, *decided, format_predicted(last.keep_s), _saving_cell(last), new, switch, last.why


def layout_table(decisions: Iterable[LayoutDecision], title: str) -> Table:
    """Make the table of a terminal, switches in bold."""
    table = bare_table(title, *LAYOUT_HEADINGS[:-1], left=LAYOUT_HEADINGS[1:4])
    table.add_column(LAYOUT_HEADINGS[-1])
    for row in layout_rows(decisions):
        table.add_row(*map(Text, row), style="bold" if row[3][0] in "③④" else None)
    return table


def _saving_cell(decision: LayoutDecision) -> str:
    by_layers, by_documents = decision.save_layers_s, decision.save_documents_s
    has_layers = by_layers is not None and (by_documents is None or by_layers < by_documents)
    return format_predicted(decision.save_s) + (" (layers)" if has_layers else "")
