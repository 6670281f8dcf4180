"""Build self-contained pages: head, styles, scripts, figures; no byte comes from the network.

Pictures are SVG, so they are there at once, without a script and in print. A content security policy forbids all loads.
Styles and scripts are 78 KB of a page with a step view, 21 KB without.
"""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from evenload.report.svg import Figure, NumberTable
from evenload.types.text import LengthUnit

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_HERE = Path(__file__).parent
_SCRIPTS = ("tip.js", "chart.js", "report.js")


def page_html(title: str, blocks: Iterable[str], scripts: Iterable[str] = (), unit: LengthUnit = "tokens") -> str:
    """Return a whole document from HTML blocks; `scripts` are further ones of this package that they need."""
    parts = [
        f'<!DOCTYPE html>\n<html lang="en" data-unit="{unit}">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{_asset('report.css')}</style>",
        "</head>\n<body>\n<main>",
        *blocks,
        "</main>",
        *(f"<script>\n{_asset(name)}</script>" for name in (*_SCRIPTS, *scripts)),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def figure_html(identifier: str, heading: str, how_to_read: str, figure: Figure, level: int = 3) -> str:
    """Return a figure with its heading, its numbers where they are few, and HTML that says how to read it."""
    numbers = folded_html("numbers", "Numbers", numbers_html(heading, figure.numbers)) if figure.numbers else ""
    parts = [
        f'<figure id="{identifier}" aria-labelledby="{identifier}-title">',
        f'<h{level} id="{identifier}-title">{escape(heading)}</h{level}>',
        figure.body,
        f"<figcaption>\n{folded_html('read', 'How to read this', f'<p>{how_to_read}</p>')}",
        f"{numbers}\n</figcaption>\n</figure>",
    ]
    return "\n".join(parts)


def numbers_html(heading: str, numbers: NumberTable) -> str:
    """Return a table; `heading` says what it shows to those who do not see it."""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in numbers.headings)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in numbers.rows
    )
    return scrolled_html(heading, f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>")


def folded_html(kind: str, summary: str, body: str) -> str:
    """Return HTML that is folded, but not in print."""
    return f'<details class="{kind}"><summary>{escape(summary)}</summary>{body}</details>'


def scrolled_html(label: str, table: str) -> str:
    """Return a table that may be wider than the page; keys can move it, so it can have the focus."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{table}</div>'


def data_block(identifier: str, json_text: str) -> str:
    """Return JSON for a script of the page, in which "<", which could end the block, is \\u003c."""
    escaped = json_text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{identifier}">{escaped}</script>'


def definitions_html(kind: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return a definition list of (name, value in HTML); "" where there is none."""
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="{kind}">{entries}</dl>' if entries else ""


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
