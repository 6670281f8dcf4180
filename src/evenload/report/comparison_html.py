"""The comparison of strategies on a page: what decides beside the names, everything else folded below; its table also
in notebooks."""

from collections.abc import Mapping, Sequence
from html import escape

from evenload.report.columns import TEXT_COLUMNS, Column, format_cell, is_feasible, shown_columns
from evenload.report.page import folded_html, scrolled_html
from evenload.types.length_unit import LengthUnit

# In this order; what a reader asks first, and why a strategy loses.
_FIRST = (
    "measured_step_time_s",
    "mean_step_time_s",
    "speedup_over_baseline",
    "time_split",
    "fraction_of_bound",
    "mfu",
    "step_time_interval_s",
    "measured_tokens_per_s",
    "tokens_per_s_per_device",
    "bubble_fraction",
    "peak_memory_bytes",
    "cap_violations",
    "deferred_tokens",
    "dropped_tokens",
)


def comparison_html(rows: Sequence[Mapping[str, object]], best: str, unit: LengthUnit) -> str:
    """A table, the best strategy marked; those that cannot run stand below with the reason."""
    feasible = [row for row in rows if is_feasible(row)]
    refused = [row for row in rows if not is_feasible(row)]
    columns = {column.key: column for column in shown_columns(feasible, unit)}
    first = [columns[key] for key in _FIRST if key in columns]
    others = [column for column in columns.values() if column not in first]
    table = scrolled_html("Comparison of strategies", strategies_table(feasible, refused, first, best))
    if not others or not feasible:
        return table
    more = scrolled_html("Further columns of the comparison", strategies_table(feasible, (), others, best))
    return table + folded_html("more", "More columns", more)


def strategies_table(
    feasible: Sequence[Mapping[str, object]],
    refused: Sequence[Mapping[str, object]],
    columns: Sequence[Column],
    best: str | None,
) -> str:
    """Rows of strategies without a style, in classes; those that cannot run last, with the reason."""
    heads = "".join(
        f'<th scope="col" title="{escape(column.meaning)}"{_text_class(column.key)}>'
        f"{escape(column.heading).replace(chr(10), '<br>')}</th>"
        for column in columns
    )
    lines = [f'<table><thead><tr><th scope="col">strategy</th>{heads}</tr></thead><tbody>']
    for row in feasible:
        cells = "".join(f"<td{_text_class(column.key)}>{_cell(column, row)}</td>" for column in columns)
        is_best = row["name"] == best
        name = f"{'▶ ' if is_best else ''}{escape(str(row['name']))}"
        kind = "best" if is_best else "feasible"
        lines.append(f'<tr class="{kind}"><th scope="row">{name}</th>{cells}</tr>')
    for row in refused:
        reason = escape(str(row.get("why") or "no reason given"))
        why = f'<td class="why" colspan="{max(1, len(columns))}">not feasible: {reason}</td>'
        lines.append(f'<tr class="refused"><th scope="row">{escape(str(row["name"]))}</th>{why}</tr>')
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _cell(column: Column, row: Mapping[str, object]) -> str:
    shown = escape(format_cell(column, row))
    # One loss a line: they are read one by one.
    return shown.replace(", ", ",<br>") if column.key == "time_split" else shown


def _text_class(key: str) -> str:
    return f' class="text {"lost" if key == "time_split" else ""}"' if key in TEXT_COLUMNS else ""
