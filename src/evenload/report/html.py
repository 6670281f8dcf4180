"""`report.html`: one page about a run or a comparison, readable anywhere and without a network.

Order: facts, comparison of strategies, figures over all of them (where the time goes, pack times, speed, loss), layouts
over time where they change, the step view (timelines, memory and documents of any step), then one section for each
trained run, document lengths and the token ledger. Nothing is drawn for what is not known; the page says what is
missing instead.
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

from evenload.errors import ConfigError
from evenload.report.columns import TEXT_COLUMNS, format_cell, is_feasible, shown_columns
from evenload.report.figures import loss_figure, step_time_figure, tokens_per_s_figure
from evenload.report.layout_figure import layout_figure
from evenload.report.length_figures import (
    READ_CLASSES,
    READ_CUMULATIVE,
    cumulative_lengths_figure,
    length_classes_figure,
)
from evenload.report.metrics_file import MetricRow, latest_per_step, predicted_part_seconds
from evenload.report.pack_time_figure import pack_time_figure
from evenload.report.page import definitions_html, figure_html, page_html
from evenload.report.run_figures import largest, metric_column, typical, typical_meaning
from evenload.report.run_report import RunReport, RunSection
from evenload.report.step_view import STEP_VIEW_SCRIPTS, step_view_html
from evenload.report.time_split_figure import time_split_figure
from evenload.report.units import format_change, format_count, format_percent, format_plain, format_seconds
from evenload.types.length_unit import LengthUnit, in_unit
from evenload.types.scaled_units import format_bytes

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
    "Each shape is the time of all packs of a strategy, relative to the mean pack of the same step and replica (or of "
    "the replicas that share it): the wider it is at a place, the more packs take that long; the box holds the middle "
    "half. A pipeline has the pace of its slowest pack, so the number beside a shape is what counts, <b>max/mean</b>: "
    "1.000 is perfectly even, 1.300 loses up to 30 %. Few packs are drawn one by one."
)
_READ_SPLIT = (
    "Every bar is the predicted step of the average device, from left to right: useful work (the lower bound, equal "
    "for all strategies), what computing costs on top of it, waiting inside pipelines and for other replicas, and the "
    "end of the step. The parts add up to the step time. Point at a part for its seconds and share; click a name to "
    "take a cause out."
)
_READ_LAYOUTS = (
    "Above, the layout that every step runs in; a mark says what was decided before it, after FlexPipe's Fig. 7. "
    "Below, the <b>predicted</b> seconds a step that were compared, mean of the steps whose lengths were known: "
    "staying, staying with documents recomputed or offloaded, and the best other layout with the switch to it. A line "
    "that breaks off does not fit memory there. Point at a mark for the conditions A to D and the reason."
)


def write_report(path: str | os.PathLike[str], report: RunReport) -> None:
    """Write the page, one file of about 5 MB plus its data."""
    Path(path).write_text(render_report(report), encoding="utf-8")


def render_report(report: RunReport) -> str:
    names = [section.name for section in report.sections]
    if len(set(names)) < len(names):
        raise ConfigError(f"report sections {names}: names must differ, they are the legend")
    trained = [(f"run-{i}", section) for i, section in enumerate(report.sections) if section.metrics]
    facts = ((name, escape(value)) for name, value in report.facts)
    blocks = [f"<h1>{escape(report.title)}</h1>", definitions_html("facts", facts)]
    if len(trained) > 1:
        links = (f'<a href="#{identifier}">{escape(section.name)}</a>' for identifier, section in trained)
        blocks.append(f"<nav>{''.join(links)}</nav>")
    if report.comparison:
        blocks.append("<h2>Comparison</h2>")
        blocks.append(_comparison(report.comparison, report.best, report.unit))
        blocks.append(_comparison_note(trained))
    blocks += _notes(report.sections)
    blocks += _overview(report)
    blocks += _layouts(report.sections)
    step_view = step_view_html(report.sections, report.best, _refused(report))
    if step_view:
        blocks += ["<h2>Inside a step</h2>", step_view]
    for identifier, section in trained:
        blocks += _training(identifier, section)
    if report.lengths is not None:
        lengths, unit = report.lengths, report.unit
        classes, cumulative = length_classes_figure(lengths, unit), cumulative_lengths_figure(lengths, unit)
        blocks.append("<h2>Documents of these steps</h2>")
        blocks.append(figure_html("classes", "Lengths", in_unit(READ_CLASSES, unit), classes))
        blocks.append(figure_html("cumulative", "Cumulative shares", in_unit(READ_CUMULATIVE, unit), cumulative))
    if report.ledger:
        blocks.append("<h2>Token ledger</h2>")
        blocks.append("<p>Every token read is trained, masked, deferred or dropped with a reason.</p>")
        blocks.append(f"<pre>{escape(chr(10).join(report.ledger))}</pre>")
    scripts = STEP_VIEW_SCRIPTS if step_view else ()
    return page_html(report.title, [block for block in blocks if block], scripts, report.unit)


def _refused(report: RunReport) -> set[str]:
    return {str(row["name"]) for row in report.comparison if not is_feasible(row)}


def _notes(sections: Sequence[RunSection]) -> list[str]:
    several = len(sections) > 1
    return [
        f'<p class="note">{escape(f"{section.name}: " if several else "")}{escape(note)}</p>'
        for section in sections
        for note in section.notes
    ]


def _overview(report: RunReport) -> list[str]:
    sections = report.sections
    blocks = ["<h2>All strategies</h2>" if len(sections) > 1 else ""]
    refused = _refused(report)
    names = {section.name: f"{section.name} *" if section.name in refused else section.name for section in sections}
    remark = " * exceeds memory: what it would take, were there more." if refused else ""
    split = [section for section in sections if section.time_split is not None]
    if split:
        figure = time_split_figure({names[one.name]: one.time_split for one in split if one.time_split is not None})
        which = _read_split_of(split)
        blocks.append(figure_html("all-split", "Where the time goes, predicted", _READ_SPLIT + which + remark, figure))
    with_times = {names[section.name]: section.timelines() for section in sections if section.steps}
    if with_times:
        figure = pack_time_figure(with_times)
        blocks.append(figure_html("all-packs", "Pack times", _READ_PACKS + remark, figure))
    trained = {section.name: section.metrics for section in sections if section.metrics}
    if len(trained) > 1:
        blocks.append(figure_html("all-speed", "Tokens per second", _READ_TOKENS, tokens_per_s_figure(trained)))
        blocks.append(figure_html("all-loss", "Loss", _READ_LOSS, loss_figure(trained)))
    return blocks if len(blocks) > 1 else []


def _layouts(sections: Sequence[RunSection]) -> list[str]:
    """Of every section whose layout may change between steps."""
    flexible = [(f"layouts-{i}", section) for i, section in enumerate(sections) if section.layout_decisions]
    blocks = ["<h2>Layouts over time</h2>"] if flexible else []
    for identifier, section in flexible:
        heading = f"{section.name}: layout of every step"
        blocks.append(figure_html(identifier, heading, _READ_LAYOUTS, layout_figure(section.layout_decisions)))
    return blocks


def _read_split_of(sections: Sequence[RunSection]) -> str:
    """Of which step of the trained runs the predicted split is."""
    steps = {section.name: section.steps[-1].step for section in sections if section.metrics and section.steps}
    if not steps:
        return ""
    shown = ", ".join(f"{escape(name)} step {step}" for name, step in steps.items())
    return (
        f" Of trained runs the bars are <b>predicted</b> too, for the last step ({shown}); what it took stands below."
    )


def _training(identifier: str, section: RunSection) -> list[str]:
    """What only a trained run knows: its headline numbers, and curves over its steps."""
    runs = {section.name: section.metrics}
    blocks = [
        f'<h2 id="{identifier}">{escape(section.name)}</h2>',
        definitions_html("tiles", _headline_numbers(section)),
        figure_html(
            f"{identifier}-time",
            "Step time, predicted and measured",
            _READ_STEP_TIME + _prediction_error(section.metrics),
            step_time_figure(section.metrics),
        ),
        figure_html(f"{identifier}-speed", "Tokens per second, measured", _READ_TOKENS, tokens_per_s_figure(runs)),
        figure_html(f"{identifier}-loss", "Loss, measured", _READ_LOSS, loss_figure(runs)),
    ]
    missing = [f"{origin} timeline" for origin in ("predicted", "measured") if origin not in section.timelines()]
    missing += [
        f"{origin} memory over time"
        for origin, steps in section.timelines().items()
        if not any(len(timeline.memory_bytes) for timeline, _ in steps)
    ]
    if missing:
        blocks.append(f"<p>Not in this report: {escape(', '.join(missing))}.</p>")
    return blocks


def _headline_numbers(section: RunSection) -> list[tuple[str, str]]:
    rows = latest_per_step(section.metrics)
    measured, predicted = typical(rows, "step_time_s"), typical(rows, "predicted_step_time_s")
    part_s = predicted_part_seconds({"step_time_s": measured, "exchange_s": typical(rows, "exchange_s")})
    off = part_s / predicted - 1 if part_s is not None and predicted else None
    meaning = typical_meaning(rows)
    peak, predicted_peak = largest(rows, "peak_memory_bytes"), largest(rows, "predicted_peak_memory_bytes")
    return [
        ("steps", f"{len(rows):,}"),
        ("loss, last step", f"{_loss(rows[-1])}<small>first {_loss(rows[0])}</small>"),
        (
            "step time, measured",
            f"{format_seconds(measured)}<small>{meaning}; predicted {format_seconds(predicted)}, "
            f"{format_change(off)}</small>",
        ),
        ("tokens/s, measured", f"{format_count(typical(rows, 'tokens_per_s'))}<small>{meaning}; real tokens</small>"),
        ("bubble, measured", f"{format_percent(typical(rows, 'bubble_fraction'))}<small>{meaning}</small>"),
        ("memory, peak of all steps", f"{format_bytes(peak)}<small>predicted {format_bytes(predicted_peak)}</small>"),
        ("data wait", f"{format_seconds(typical(rows, 'data_wait_s'))}<small>{meaning}</small>"),
    ]


def _loss(row: MetricRow) -> str:
    return format_plain(None if row["loss"] is None else float(row["loss"]), ".4f")


def _prediction_error(rows: Sequence[MetricRow]) -> str:
    rows = latest_per_step(rows)
    measured = np.array([predicted_part_seconds(row) for row in rows], float)
    predicted = metric_column(rows, "predicted_step_time_s")
    known = np.isfinite(measured) & np.isfinite(predicted) & (measured > 0)
    if not known.any():
        return " No step has both numbers."
    error = float(np.abs(predicted[known] / measured[known] - 1).mean())
    return f" Mean absolute error of the prediction over {int(known.sum()):,} steps: <b>{format_percent(error)}</b>."


def _comparison_note(trained: Sequence[tuple[str, RunSection]]) -> str:
    """What the numbers of trained runs in the comparison are; nothing for predictions, whose columns say it."""
    meanings = {typical_meaning(section.metrics) for _, section in trained}
    if not meanings:
        return ""
    return (
        f"<p>Times, tokens/s, bubble and max/mean are the {escape(' or '.join(sorted(meanings)))} of each run, "
        "measured unless the heading says predicted; memory is the measured peak of all steps.</p>"
    )


def _comparison(rows: Sequence[Mapping[str, object]], best: str, unit: LengthUnit) -> str:
    feasible = [row for row in rows if is_feasible(row)]
    refused = [row for row in rows if not is_feasible(row)]
    columns = shown_columns(feasible, unit)
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
