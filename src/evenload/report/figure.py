"""`Figure`: a finished picture of a page, and the parts that pictures are made of: panels, rows, legends.

A panel is an SVG whose axes stand around it. It needs no script to be seen: it is there when the page opens, in
print and for who switched scripts off; `report.js` adds what pointing shows.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from evenload.report import svg_marks as svg
from evenload.report.axes import Scale, Tick


@dataclass(frozen=True)
class NumberTable:
    """What a picture shows as numbers: headings, then a row of cells each, the first names the row."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A picture in HTML, one sentence that says what it shows, and its numbers where they are few."""

    body: str
    label: str
    numbers: NumberTable | None = None


@dataclass(frozen=True)
class Axes:
    """Of a panel: ticks and a title on both sides, and the room for the labels on the left."""

    x: Scale
    y: Scale
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_title: str = ""
    y_title: str = ""
    left_px: int = 58
    height_px: int = 250

    def y_px(self, value: float) -> float:
        """Pixels from the top."""
        return self.height_px * (1 - self.y.share(value))


@dataclass(frozen=True)
class Curves:
    """What pointing at a panel shows: values of every series at the nearest x; `kind` as in `axes.tick_labels`."""

    x_name: str
    x: Sequence[float]
    kind: str
    series: Sequence[tuple[str, str, Sequence[float | None]]]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self, axes: Axes) -> str:
        """For the script: the places of the values are those of the axes."""
        series = [{"name": n, "color": c, "values": [_short(v) for v in values]} for n, c, values in self.series]
        places = [round(axes.x.share(value), 5) for value in self.x]
        data = {"xName": self.x_name, "x": [_short(v) for v in self.x], "at": places, "kind": self.kind}
        return json.dumps(data | {"series": series} | dict(self.extra), separators=(",", ":"))


def panel(axes: Axes, marks: Iterable[str], label: str, curves: Curves | None = None) -> str:
    """Marks within axes; with `curves` it can be pointed at and walked through by arrow keys."""
    height = axes.height_px
    parts = [svg.rule((0, 1), axes.y_px(tick.at), "grid") for tick in axes.y_ticks]
    parts += [
        svg.text(0, axes.y_px(tick.at) + 4, tick.label, anchor="end", dx_px=-8, kind=_tick_kind(tick))
        for tick in axes.y_ticks
    ]
    parts += [svg.text(axes.x.share(tick.at), height + 17, tick.label, kind=_tick_kind(tick)) for tick in axes.x_ticks]
    parts.append(svg.rule((0, 1), height, "axis"))
    parts += marks
    title = f'<div class="y-title">{escape(axes.y_title)}</div>' if axes.y_title else ""
    below = f'<div class="x-title">{escape(axes.x_title)}</div>' if axes.x_title else ""
    points = f" data-curves='{_attribute(curves.as_json(axes))}' tabindex=\"0\"" if curves else ""
    what = f'role="img" aria-label="{escape(label)}"'
    if curves:
        what = f'role="group" aria-roledescription="chart" aria-label="{escape(label)}; arrow keys read values"'
    picture = (
        f'<svg class="plot" width="100%" height="{height}" overflow="visible" {what}{points}>{"".join(parts)}</svg>'
    )
    return f'{title}<div class="panel" style="--left:{axes.left_px}px">{picture}</div>{below}'


def rows_chart(
    rows: Iterable[tuple[str, str, str]],
    row_px: int,
    label: str,
    *,
    x: Scale,
    ticks: Sequence[Tick] = (),
    title: str = "",
    names_px: int = 120,
    notes_px: int = 170,
) -> str:
    """Rows of (name, marks, note) on one axis: beside each other on a wide page, name and note over the marks on a
    narrow one."""
    lines = "".join(svg.upright(x.share(tick.at), 0, row_px, "grid") for tick in ticks)
    parts = []
    for name, marks, note in rows:
        picture = f'<svg class="plot" width="100%" height="{row_px}" overflow="visible" aria-hidden="true">'
        parts.append(
            f'<div class="row"><span class="name">{escape(name)}</span>{picture}{lines}{marks}</svg>'
            f'<span class="value">{escape(note)}</span></div>'
        )
    if ticks:
        words = "".join(svg.text(x.share(tick.at), 14, tick.label, kind=_tick_kind(tick)) for tick in ticks)
        axis = f'<svg class="plot" width="100%" height="20" overflow="visible" aria-hidden="true">{words}</svg>'
        parts.append(f'<div class="row ticks"><span class="name"></span>{axis}<span class="value"></span></div>')
    below = f'<div class="x-title">{escape(title)}</div>' if title else ""
    style = f"--names:{names_px}px;--notes:{notes_px}px"
    rows_html = f'<div class="rows" role="group" aria-label="{escape(label)}" style="{style}">{"".join(parts)}</div>'
    return rows_html + below


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """(name, colour, kind) with a swatch each; kinds: "fill", or a line's dash."""
    parts = []
    for name, color, kind in entries:
        look = f"background:{color}" if kind == "fill" else f"border-top:2px {_BORDERS[kind]} {color}"
        of_line = "" if kind == "fill" else ' class="line"'
        parts.append(f'<span><i{of_line} style="{look}"></i>{escape(name)}</span>')
    return f'<div class="legend">{"".join(parts)}</div>' if parts else ""


_BORDERS = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dashed"}


def names_width_px(names: Iterable[str], most_px: int = 220) -> int:
    """Room that names want beside rows."""
    return min(most_px, 20 + 7 * max((len(name) for name in names), default=0))


def _tick_kind(tick: Tick) -> str:
    return "minor" if tick.is_minor else ""


def _short(value: float | None) -> float | None:
    if value is None or value != value or abs(value) == float("inf"):
        return None
    return float(f"{value:.7g}")


def _attribute(json_text: str) -> str:
    """Within single quotes."""
    return json_text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")
