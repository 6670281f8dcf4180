"""Write the page of `evenload plan --lengths-per-step`: seconds of every step as a run divided its documents, and as
`evenload.micro_batches` does."""

from collections.abc import Iterable, Sequence
from html import escape

from evenload.report.figures import divisions_figure
from evenload.report.page import definitions_html, figure_html, folded_html, numbers_html, page_html
from evenload.report.svg import NumberTable
from evenload.report.units import format_percent, format_seconds
from evenload.types.division import JudgedStep, JudgedSteps
from evenload.types.text import counted

MOST_ROWS = 20
"""Steps in the table."""
_READ = (
    "The <b>predicted</b> seconds of every step of the file, by its line, until the last rank is done. <b>Bound</b>: "
    "all work spread evenly over the ranks, or the longest document where that is more, and the constant of every "
    "micro-batch that the token limit needs. What lies above it is waiting, and constants of further micro-batches."
)


def divisions_page(title: str, headline: str, judged: JudgedSteps, facts: Iterable[tuple[str, str]]) -> str:
    """Return the page; all texts are plain."""
    rows = sorted(judged.steps, key=lambda one: -one.recorded.waiting_s)[:MOST_ROWS]
    heading = f"{len(rows):,} of {counted(len(judged.steps), 'step')}, by how long ranks wait"
    settings = definitions_html("facts", ((name, escape(value)) for name, value in facts))
    blocks = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="headline">{escape(headline)}</p>',
        _tiles(judged),
        folded_html("settings", "Settings", settings),
        figure_html("steps", "Seconds of every step", _READ, divisions_figure(judged.steps), level=2),
        f"<h2>{escape(heading)}</h2>",
        numbers_html(heading, _table(rows)),
    ]
    return page_html(title, blocks)


def _tiles(judged: JudgedSteps) -> str:
    tiles = [
        (f"a step, {name}", format_seconds(one.step_s), f"ranks wait {format_percent(one.waiting_share)}")
        for name, one in judged.divisions
    ]
    factor = judged.recorded.step_s / judged.ours.step_s
    tiles += [("ours", f"{factor:.2f} times", "as fast")] if judged.theirs else []
    above = f"ours is {format_percent(judged.ours.step_s / judged.bound_s - 1)} above"
    tiles += [("bound", format_seconds(judged.bound_s), above)]
    return definitions_html("tiles", ((name, f"{value}<small>{detail}</small>") for name, value, detail in tiles))


def _table(steps: Sequence[JudgedStep]) -> NumberTable:
    names = [head for name, _ in steps[0].divisions for head in (name, "waiting", "micro-batches")]
    rows = []
    for step in steps:
        row = [f"{step.step:,}", f"{step.documents:,}", f"{step.tokens:,}"]
        for _, one in step.divisions:
            row += [format_seconds(one.step_s), format_percent(one.waiting_share), f"{one.micro_batches:.0f}"]
        rows.append((*row, format_seconds(step.bound_s)))
    return NumberTable(("step", "documents", "tokens", *names, "bound"), tuple(rows))
