"""The frame of a self-contained page: head, styles, plotly.js once, figures as data, and the rule that no
byte comes from the network.

Every figure is a JSON data block; `report.js` draws it when it is scrolled near, so a page with many
strategies opens at once. A content security policy in the page itself forbids all loads: even a mistake in a
figure cannot reach out. `<` is escaped inside data blocks, so no text can end its block early.
Price: plotly.js is 4.8 MB of every page.
"""

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, cast

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from evenload.types.length_unit import LengthUnit

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)
_HERE = Path(__file__).parent


def page_html(title: str, blocks: Iterable[str], scripts: Iterable[str] = (), unit: LengthUnit = "tokens") -> str:
    """A whole document from finished HTML blocks; `scripts` are further ones of this package that they need."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en" data-unit="{unit}">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_asset('report.css')}</style>",
            "</head>",
            "<body>",
            "<main>",
            *blocks,
            '<noscript><p class="note">The figures of this page need JavaScript; it loads nothing from the network.'
            "</p></noscript>",
            "</main>",
            f"<script>{get_plotlyjs()}</script>",
            f"<script>\n{_asset('report.js')}</script>",
            *(f"<script>\n{_asset(name)}</script>" for name in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


def figure_html(identifier: str, heading: str, how_to_read: str, figure: go.Figure) -> str:
    """One figure, its heading, and HTML that says how to read it; its height is kept, its width follows the page."""
    height = int(cast(Any, figure.layout).height)
    # The legend is a row at the very top, over the panels' headings, left of the buttons.
    place = {"orientation": "h", "xref": "container", "yref": "container", "x": 0, "y": 1}
    legend = place | {"xanchor": "left", "yanchor": "top", "bgcolor": "rgba(0,0,0,0)", "tracegroupgap": 0}
    figure = go.Figure(figure).update_layout(template="none", autosize=True, legend=legend)
    figure.update_xaxes(title_font_size=12.5).update_yaxes(title_font_size=12.5)
    return "\n".join(
        [
            f'<figure id="{identifier}">',
            f"<h3>{escape(heading)}</h3>",
            f'<div class="plot" data-figure="{identifier}-data" style="height:{height}px"></div>',
            data_block(f"{identifier}-data", str(figure.to_json())),
            f"<figcaption>{how_to_read}</figcaption>",
            "</figure>",
        ]
    )


def data_block(identifier: str, json_text: str) -> str:
    """JSON for a script of the page."""
    # Inside a script element only "<" can end the block or open a comment; as \u003c it is the same JSON.
    escaped = json_text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{identifier}">{escaped}</script>'


def definitions_html(kind: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A definition list of (name, value in HTML); "" where there is none."""
    entries = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="{kind}">{entries}</dl>' if entries else ""


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
