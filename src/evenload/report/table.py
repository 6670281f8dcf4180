"""What the terminal shows: the table of strategies, and one line a training step."""

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from evenload.report.columns import format_cell, is_feasible, shown_columns
from evenload.report.metrics_file import MetricRow, MetricValue
from evenload.report.units import (
    format_bytes,
    format_change,
    format_count,
    format_percent,
    format_plain,
    format_seconds,
)


def comparison_table(rows: Sequence[Mapping[str, object]], best: str = "", title: str = "") -> Group:
    """Strategies side by side; the best marked, those that cannot run under the table with the reason.

    Args:
        rows: objects of `strategies` in `evenload plan --json` (DESIGN §11).
        best: name of the row to mark.
        title: over the table; plain text.
    """
    feasible = [row for row in rows if is_feasible(row)]
    refused = [row for row in rows if not is_feasible(row)]
    columns = shown_columns(feasible)
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        header_style="bold",
        pad_edge=False,
    )
    table.add_column("strategy", no_wrap=True)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.key == "layout" else "right", no_wrap=True)
    for row in feasible:
        is_best = row["name"] == best
        name = Text(f"{'▶' if is_best else ' '} {row['name']}")
        cells = [Text(format_cell(column, row)) for column in columns]
        table.add_row(name, *cells, style="bold green" if is_best else None)
    # Under the table and not in it: reasons are sentences and may use the whole width.
    reasons = [Text(f"{row['name']}: not feasible: {row.get('why') or 'no reason given'}") for row in refused]
    return Group(table, *reasons)


def step_line(row: MetricRow) -> str:
    """One line about one step: what was trained, how fast, and how far the prediction was off.

    Tokens are real ones, without padding. A dash stands for what is not known.

    Args:
        row: the keys of `METRIC_KEYS`.
    """
    measured_s, predicted_s = _number(row["step_time_s"]), _number(row["predicted_step_time_s"])
    off = measured_s / predicted_s - 1 if measured_s and predicted_s else None
    parts = [
        f"step {row['step']}",
        f"loss {format_plain(_number(row['loss']), '.4f')}",
        f"grad_norm {format_plain(_number(row['grad_norm']), '.3g')}",
        f"lr {format_plain(_number(row['lr']), '.3g')}",
        f"{format_count(_number(row['tokens_per_s']))} tokens/s",
        f"{format_seconds(measured_s)} (predicted {format_seconds(predicted_s)}, {format_change(off)})",
        f"bubble {format_percent(_number(row['bubble_fraction']))}",
        "max/mean fwd {} bwd {} dp {}".format(
            *(
                format_plain(_number(row[key]), ".2f")
                for key in ("imbalance_forward", "imbalance_backward", "imbalance_dp")
            )
        ),
        f"memory {format_bytes(_number(row['peak_memory_bytes']))}",
    ]
    if row["data_wait_s"]:
        parts.append(f"data wait {format_seconds(_number(row['data_wait_s']))}")
    if row["deferred_documents"]:
        parts.append(f"{row['deferred_documents']} documents deferred")
    return " | ".join(parts)


def _number(value: MetricValue) -> float | None:
    return None if value is None else float(value)
