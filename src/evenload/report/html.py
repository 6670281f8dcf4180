"""Write `report.html`: one page about a run or a comparison, readable anywhere and without a network.

What is not known is not drawn; the page says what is missing.
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from evenload.errors import ConfigError
from evenload.report.lengths import length_blocks
from evenload.report.page import definitions_html, figure_html, folded_html, numbers_html, page_html, scrolled_html
from evenload.report.run_files import latest_per_step
from evenload.report.run_report import RunReport, RunSection, cards_html, curves_html, tiles_html, time_split_figure
from evenload.report.step_view import STEP_VIEW_SCRIPTS, step_view_html
from evenload.report.svg import NumberTable
from evenload.report.table import (
    FIRST_COLUMNS,
    LAYOUT_HEADINGS,
    READ_LAYOUTS,
    TEXT_COLUMNS,
    Column,
    first_columns,
    first_rows,
    format_cell,
    is_feasible,
    layout_rows,
    shown_columns,
)
from evenload.types.text import LengthUnit

_READ_SPLIT = (
    "Every bar is the predicted step of the average device, from left to right: useful work (the lower bound, equal "
    "for all strategies), what computing costs on top of it, waiting inside pipelines and for other replicas, and the "
    "end of the step. The parts add up to the step time. Point at a part for its seconds and share."
)


Part = tuple[str, str, list[str]]
"""(identifier, heading, blocks of HTML) of a section of the page."""


def write_report(path: str | os.PathLike[str], report: RunReport) -> None:
    Path(path).write_text(render_report(report), encoding="utf-8")


def render_report(report: RunReport) -> str:
    """Return the page; `ConfigError` where two sections have one name."""
    names = [section.name for section in report.sections]
    if len(set(names)) < len(names):
        raise ConfigError(f"report sections {names}: names must differ, they are the legend")
    parts = [part for part in _parts(report) if part[2]]
    headline = f'<p class="headline">{escape(report.headline)}</p>' if report.headline else ""
    blocks = [f"<h1>{escape(report.title)}</h1>", headline, *_answer(report)]
    if (run := _trained(report)) is not None:
        blocks.append(tiles_html(run))
    if len(parts) > 1 and report.cards:
        blocks.append('<h2 id="details">Details</h2>')
    if report.facts:
        facts = ((name, escape(value)) for name, value in report.facts)
        blocks.append(folded_html("settings", "Settings", definitions_html("facts", facts)))
    for section in report.sections:
        name = f"{section.name}: " if len(names) > 1 else ""
        blocks += [f'<p class="note">{escape(name)}{escape(note)}</p>' for note in section.notes]
    if len(parts) > 1:
        links = (f'<a href="#{identifier}">{escape(heading)}</a>' for identifier, heading, _ in parts)
        blocks.append(f'<nav aria-label="Contents">{"".join(links)}</nav>')
    for identifier, heading, of_part in parts:
        head = f'<section aria-labelledby="{identifier}"><h2 id="{identifier}">{escape(heading)}</h2>'
        blocks += [head, *of_part, "</section>"]
    if report.ledger:
        rule = "<p>Every token read is trained, masked, deferred or dropped with a reason.</p>"
        content = escape("\n".join(report.ledger))
        ledger = f'<pre role="region" tabindex="0" aria-label="Token ledger">{content}</pre>'
        blocks.append(folded_html("settings", "Token ledger", rule + ledger))
    scripts = STEP_VIEW_SCRIPTS if any(section.steps for section in report.sections) else ()
    return page_html(report.title, filter(None, blocks), scripts, report.unit)


def _answer(report: RunReport) -> list[str]:
    """Return what stands above the details: cards, what they are of, the fastest rows, and what to do next."""
    if not report.cards:
        return []
    cards = cards_html((name, escape(value), escape(remark)) for name, value, remark in report.cards)
    table = fastest_table(report.comparison, report.best, report.unit)
    blocks = [cards, f'<p class="summary">{escape(report.summary)}</p>']
    blocks.append(table and f'<div class="first">{scrolled_html("The fastest strategies", table)}</div>')
    return [*blocks, f'<p class="next">{escape(report.next_step)}</p>' if report.next_step else ""]


def fastest_table(comparison: Sequence[Mapping[str, object]], best: Sequence[str], unit: LengthUnit) -> str:
    """Return the first rows and columns of a comparison, as a terminal shows them; "" where nothing can run."""
    rows = first_rows([row for row in comparison if is_feasible(row)])
    return strategies_table(rows, (), first_columns(rows, unit), best) if rows else ""


def _trained(report: RunReport) -> RunSection | None:
    return next((section for section in report.sections if section.metrics), None)


def _parts(report: RunReport) -> list[Part]:
    run = _trained(report)
    refused = {str(row["name"]) for row in report.comparison if not is_feasible(row)}
    sections = {f"{one.name} *" if one.name in refused else one.name: one for one in report.sections}
    remark = " * exceeds memory: what it would take, were there more." if refused else ""
    step_view = step_view_html(report.sections, report.best[0] if report.best else "", refused)
    comparison = [comparison_html(report.comparison, report.best, report.unit)] if report.comparison else []
    parts: list[Part] = [
        ("comparison", "All strategies" if report.cards else "Comparison", comparison),
        ("time", "Where the time goes", _split(sections, remark)),
    ]
    curves = "curves", "Step by step", [] if run is None else curves_html("run-0", run)
    parts.insert(len(parts) if report.comparison else 0, curves)
    parts.append(("steps", "Inside a step", [_left_out_steps(run), step_view] if step_view else []))
    layouts = [_layouts(section) for section in report.sections if section.layout_decisions]
    parts.append(("layouts", "Layouts over time", layouts))
    lengths = [] if report.lengths is None else length_blocks(report.lengths, report.unit, "Lengths")
    return [*parts, ("documents", "Documents of these steps", lengths)]


def _layouts(section: RunSection) -> str:
    title, rows = f"{section.name}: layout of every step", tuple(layout_rows(section.layout_decisions))
    table = numbers_html(title, NumberTable(LAYOUT_HEADINGS, rows))
    return f'<div class="layouts"><h3>{escape(title)}</h3>{table}<p>{READ_LAYOUTS}</p></div>'


def _left_out_steps(run: RunSection | None) -> str:
    """Say which steps of a long run are in the page."""
    shown, num_steps = (len(run.steps), len(latest_per_step(run.metrics))) if run else (0, 0)
    why = "the last ones while a run goes on; at its end all, or so many that the page stays small"
    is_part = 1 < shown < num_steps
    return f"<p>{shown:,} of {num_steps:,} steps can be looked at here: {why}.</p>" if is_part else ""


def _split(sections: Mapping[str, RunSection], remark: str) -> list[str]:
    splits = {name: one.time_split for name, one in sections.items() if one.time_split is not None}
    if not splits:
        return []
    trained = [one for one in sections.values() if one.time_split is not None and one.metrics and one.steps]
    steps = ", ".join(f"{escape(one.name)} step {one.steps[-1].step}" for one in trained)
    of_runs = (
        f" Of trained runs the bars are <b>predicted</b> too, for the last step ({steps}); what it took stands below."
    )
    read = _READ_SPLIT + (of_runs if steps else "") + remark
    return [figure_html("all-split", "Predicted seconds of a step, by cause", read, time_split_figure(splits))]


def comparison_html(rows: Sequence[Mapping[str, object]], best: Sequence[str], unit: LengthUnit) -> str:
    """Return the comparison, the best strategy marked, those that cannot run last; further columns are folded."""
    feasible = [row for row in rows if is_feasible(row)]
    refused = [row for row in rows if not is_feasible(row)]
    columns = shown_columns(feasible, unit)
    first = [column for column in columns if column.key in FIRST_COLUMNS]
    others = [column for column in columns if column.key not in FIRST_COLUMNS]
    table = scrolled_html("Comparison of strategies", strategies_table(feasible, refused, first, best))
    if not others or not feasible:
        return table
    more = scrolled_html("Further columns of the comparison", strategies_table(feasible, (), others, best))
    return table + folded_html("more", "More columns", more)


def strategies_table(
    feasible: Sequence[Mapping[str, object]],
    refused: Sequence[Mapping[str, object]],
    columns: Sequence[Column],
    best: Sequence[str],
) -> str:
    """Return a table of strategies, the `best` marked; those that cannot run last, with the reason."""
    heads = "".join(
        f'<th scope="col" title="{escape(column.meaning)}"{_text_class(column.key)}>'
        f"{escape(column.heading).replace(chr(10), '<br>')}</th>"
        for column in columns
    )
    parts = [f'<table><thead><tr><th scope="col">strategy</th>{heads}</tr></thead><tbody>']
    for row in feasible:
        cells = ""
        for column in columns:
            shown = escape(format_cell(column, row))
            # One loss a line: they are read one by one.
            shown = shown.replace(", ", ",<br>") if column.key == "time_split" else shown
            cells += f"<td{_text_class(column.key)}>{shown}</td>"
        kind, mark = ("best", "▶ ") if row["name"] in best else ("feasible", "")
        parts.append(f'<tr class="{kind}"><th scope="row">{mark}{escape(str(row["name"]))}</th>{cells}</tr>')
    for row in refused:
        reason = escape(str(row.get("why") or "no reason given"))
        why = f'<td class="why" colspan="{max(1, len(columns))}">not feasible: {reason}</td>'
        parts.append(f'<tr class="refused"><th scope="row">{escape(str(row["name"]))}</th>{why}</tr>')
    return "\n".join([*parts, "</tbody></table>"])


def _text_class(key: str) -> str:
    """Return the class of a column's cells: of text, of losses, and whether a phone leaves it out at first."""
    kinds = {"text": key in TEXT_COLUMNS, "lost": key == "time_split", "minor": key not in FIRST_COLUMNS[:4]}
    return f' class="{" ".join(kind for kind, is_so in kinds.items() if is_so)}"'
