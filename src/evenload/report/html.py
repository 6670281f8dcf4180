"""`report.html`: one page about a run or a comparison, readable anywhere and without a network.

Order: facts, comparison of strategies, figures over all runs, then one section a run: headline numbers,
timelines predicted over measured, speed, pack times, memory, loss. Nothing is drawn for what is not known;
the page says what is missing instead.
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from evenload.errors import ConfigError
from evenload.report.columns import TEXT_COLUMNS, format_cell, is_feasible, shown_columns
from evenload.report.figures import (
    loss_figure,
    memory_figure,
    metric_column,
    pack_time_figure,
    step_time_figure,
    tokens_per_s_figure,
)
from evenload.report.metrics_file import MetricRow, latest_per_step
from evenload.report.page import figure_html, page_html
from evenload.report.run_report import RunReport, RunSection
from evenload.report.timeline_figure import choose_replicas, timeline_figure
from evenload.report.units import (
    format_bytes,
    format_change,
    format_count,
    format_percent,
    format_plain,
    format_seconds,
)

_READ_TIMELINE = (
    "Every row is a pipeline rank, every bar one pack on one stage: <b>blue</b> forward, <b>orange</b> backward, "
    "light and dark in turn so that neighbours show. <b>Grey</b> is time in which the rank computes no pack. "
    "Predicted and measured share the time axis: bars that stand in the same place were predicted right. Point at a "
    "bar for its content; drag sideways to zoom in, double-click to see the whole step again."
)
_READ_STEP_TIME = (
    "Solid is what the steps took, dashed what the simulator said beforehand. A constant gap is a cost model off "
    "by a factor (calibrate again); spikes of the solid line alone are waits outside of the plan."
)
_READ_TOKENS = "Real tokens trained in a second over all devices. Padding does not count, so runs compare fairly."
_READ_LOSS = (
    "Cross entropy over the label tokens of the whole global batch. Packing rearranges only inside of a step, so "
    "runs on the same data and seed must lie on one line (only <code>wlb</code> moves documents between steps)."
)
_READ_PACKS = (
    "Each box is the time of the packs of a step: the box holds the middle half, its solid line is the median, the "
    "dashed line the mean. A pipeline moves at the pace of its slowest pack, so the number beside a box is what "
    "counts, <b>max/mean</b>: 1.000 is perfectly even, 1.300 loses up to 30 %. Hollow grey is predicted, filled blue "
    "is measured."
)
_READ_MEMORY = (
    "Bytes each pipeline rank holds at every moment of the step. The highest point of any line must stay under the "
    "limit; early ranks hold the activations of more packs in flight."
)


def write_report(path: str | os.PathLike[str], report: RunReport) -> None:
    """Write the page, one file of about 5 MB plus its data.

    Raises:
        ConfigError: two sections have the same name.
    """
    Path(path).write_text(render_report(report), encoding="utf-8")


def render_report(report: RunReport) -> str:
    """The page as text; see `write_report`."""
    names = [section.name for section in report.sections]
    if len(set(names)) < len(names):
        raise ConfigError(f"report sections {names}: names must differ, they are the legend")
    blocks = [f"<h1>{escape(report.title)}</h1>", _definitions("facts", report.facts)]
    if len(report.sections) > 1:
        links = (f'<a href="#run-{i}">{escape(name)}</a>' for i, name in enumerate(names))
        blocks.append(f"<nav>{''.join(links)}</nav>")
    if report.comparison:
        blocks.append("<h2>Comparison</h2>")
        blocks.append(_comparison(report.comparison, report.best))
    if len(report.sections) > 1:
        blocks += _overview(report.sections)
    for index, section in enumerate(report.sections):
        blocks += _section(f"run-{index}", section)
    if report.ledger:
        blocks.append("<h2>Token ledger</h2>")
        blocks.append("<p>Every token read is trained, masked, deferred or dropped with a reason.</p>")
        blocks.append(f"<pre>{escape(chr(10).join(report.ledger))}</pre>")
    return page_html(report.title, [block for block in blocks if block])


def _overview(sections: Sequence[RunSection]) -> list[str]:
    """Figures that put all runs into one picture."""
    blocks = ["<h2>All runs</h2>"]
    with_times = {section.name: section.timelines() for section in sections if section.timelines()}
    if with_times:
        blocks.append(figure_html("all-packs", "Pack times", _READ_PACKS, pack_time_figure(with_times)))
    trained = {section.name: section.metrics for section in sections if section.metrics}
    if trained:
        blocks.append(figure_html("all-speed", "Tokens per second", _READ_TOKENS, tokens_per_s_figure(trained)))
        blocks.append(figure_html("all-loss", "Loss", _READ_LOSS, loss_figure(trained)))
    return blocks if len(blocks) > 1 else []


def _section(identifier: str, section: RunSection) -> list[str]:
    blocks = [f'<h2 id="{identifier}">{escape(section.name)}</h2>']
    blocks += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    blocks.append(_definitions("tiles", _headline_numbers(section)))
    timelines = section.timelines()
    if timelines:
        blocks.append(_timelines(identifier, section, timelines))
    if section.metrics:
        figure = step_time_figure(section.metrics)
        caption = _READ_STEP_TIME + _prediction_error(section.metrics)
        blocks.append(figure_html(f"{identifier}-time", "Step time, predicted and measured", caption, figure))
        runs = {section.name: section.metrics}
        blocks.append(
            figure_html(f"{identifier}-speed", "Tokens per second, measured", _READ_TOKENS, tokens_per_s_figure(runs))
        )
        blocks.append(figure_html(f"{identifier}-loss", "Loss, measured", _READ_LOSS, loss_figure(runs)))
    if timelines:
        heading = f"Pack times, {_origins(timelines)}"
        blocks.append(
            figure_html(f"{identifier}-packs", heading, _READ_PACKS, pack_time_figure({section.name: timelines}))
        )
    sampled = {name: timeline for name, timeline in timelines.items() if len(timeline.memory_bytes)}
    if sampled:
        figure = memory_figure(sampled, section.memory_limit_bytes)
        blocks.append(figure_html(f"{identifier}-memory", f"Memory, {_origins(sampled)}", _READ_MEMORY, figure))
    missing = _missing(section)
    if missing:
        blocks.append(f"<p>Not in this report: {escape(', '.join(missing))}.</p>")
    return blocks


def _timelines(identifier: str, section: RunSection, timelines: Mapping) -> str:
    replicas = choose_replicas(list(timelines.values()))
    num_replicas = len(set().union(*(np.unique(timeline.dp_rank).tolist() for timeline in timelines.values())))
    caption = _READ_TIMELINE
    if len(replicas) < num_replicas:
        caption += (
            f" Shown are the {len(replicas)} of {num_replicas} data-parallel replicas that end last; "
            "trace.json holds all."
        )
    step = "" if section.timeline_step is None else f" of step {section.timeline_step}"
    return figure_html(
        f"{identifier}-timeline",
        f"Timeline{step}, {_origins(timelines)}",
        caption,
        timeline_figure(timelines, section.task_labels, replicas),
    )


def _origins(timelines: Mapping[str, object]) -> str:
    return " and ".join(timelines)


def _headline_numbers(section: RunSection) -> list[tuple[str, str]]:
    """(name, HTML value) of the numbers a reader asks for first; medians over the steps."""
    rows = latest_per_step(section.metrics)
    tiles: list[tuple[str, str]] = []
    if rows:
        measured, predicted = _median(rows, "step_time_s"), _median(rows, "predicted_step_time_s")
        off = measured / predicted - 1 if measured is not None and predicted else None
        tiles += [
            ("steps", f"{len(rows):,}"),
            ("loss", f"{_loss(rows[-1])}<small>first {_loss(rows[0])}</small>"),
            (
                "step time, median",
                f"{format_seconds(measured)}<small>predicted {format_seconds(predicted)}, {format_change(off)}</small>",
            ),
            ("tokens/s, median", f"{format_count(_median(rows, 'tokens_per_s'))}<small>real tokens</small>"),
            ("bubble, median", format_percent(_median(rows, "bubble_fraction"))),
            ("memory, peak", _measured_and_predicted_peak(rows)),
            ("data wait, median", format_seconds(_median(rows, "data_wait_s"))),
        ]
    else:
        for origin, timeline in section.timelines().items():
            tiles += [
                (f"step time, {origin}", format_seconds(timeline.step_time_s)),
                (f"bubble, {origin}", format_percent(timeline.bubble_fraction())),
                (f"memory peak, {origin}", format_bytes(timeline.peak_bytes() or None)),
            ]
    return tiles


def _loss(row: MetricRow) -> str:
    return format_plain(None if row["loss"] is None else float(row["loss"]), ".4f")


def _measured_and_predicted_peak(rows: Sequence[MetricRow]) -> str:
    measured, predicted = _maximum(rows, "peak_memory_bytes"), _maximum(rows, "predicted_peak_memory_bytes")
    return f"{format_bytes(measured)}<small>predicted {format_bytes(predicted)}</small>"


def _prediction_error(rows: Sequence[MetricRow]) -> str:
    rows = latest_per_step(rows)
    measured, predicted = metric_column(rows, "step_time_s"), metric_column(rows, "predicted_step_time_s")
    known = np.isfinite(measured) & np.isfinite(predicted) & (measured > 0)
    if not known.any():
        return " No step has both numbers."
    error = float(np.abs(predicted[known] / measured[known] - 1).mean())
    return f" Mean absolute error of the prediction over {int(known.sum()):,} steps: <b>{format_percent(error)}</b>."


def _missing(section: RunSection) -> list[str]:
    missing = [f"{name} timeline" for name in ("predicted", "measured") if name not in section.timelines()]
    if not section.metrics:
        missing.append("loss and speed over steps")
    missing += [
        f"{name} memory over time" for name, timeline in section.timelines().items() if not len(timeline.memory_bytes)
    ]
    return missing


def _comparison(rows: Sequence[Mapping[str, object]], best: str) -> str:
    feasible = [row for row in rows if is_feasible(row)]
    refused = [row for row in rows if not is_feasible(row)]
    columns = shown_columns(feasible)
    heads = "".join(
        f'<th scope="col" title="{escape(column.meaning)}"{_text_class(column.key)}>'
        f"{escape(column.heading).replace(chr(10), '<br>')}</th>"
        for column in columns
    )
    lines = [f'<div class="scroll"><table><thead><tr><th scope="col">strategy</th>{heads}']
    lines.append("</tr></thead><tbody>")
    for row in feasible:
        cells = "".join(f"<td{_text_class(column.key)}>{escape(format_cell(column, row))}</td>" for column in columns)
        is_best = row["name"] == best
        name = f"{'▶ ' if is_best else ''}{escape(str(row['name']))}"
        kind = "best" if is_best else "feasible"
        lines.append(f'<tr class="{kind}"><td>{name}</td>{cells}</tr>')
    for row in refused:
        reason = escape(str(row.get("why") or "no reason given"))
        why = f'<td class="why" colspan="{max(1, len(columns))}">not feasible: {reason}</td>'
        lines.append(f'<tr class="refused"><td>{escape(str(row["name"]))}</td>{why}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def _text_class(key: str) -> str:
    return ' class="text"' if key in TEXT_COLUMNS else ""


def _definitions(kind: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A definition list; values of "tiles" are our own HTML, all others are escaped."""
    if not pairs:
        return ""
    entries = (
        f"<div><dt>{escape(name)}</dt><dd>{value if kind == 'tiles' else escape(value)}</dd></div>"
        for name, value in pairs
    )
    return f'<dl class="{kind}">{"".join(entries)}</dl>'


def _median(rows: Sequence[MetricRow], key: str) -> float | None:
    values = metric_column(rows, key)
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else None


def _maximum(rows: Sequence[MetricRow], key: str) -> float | None:
    values = metric_column(rows, key)
    values = values[~np.isnan(values)]
    return float(values.max()) if len(values) else None
