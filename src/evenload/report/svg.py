"""Draw pictures as SVG text: marks, colours, axes, and the panels and rows they form (`Figure`).

Across, a place is a share of the picture's width (0 to 1); down, it is pixels. So bars, dots and texts move with the
page, without a script, while letters and line widths stay. Lines and shapes, which have no percentages in SVG, are in
an inner picture that is stretched. All texts are escaped here.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from evenload.types.text import SECOND_UNITS, format_count

Point = tuple[float, float | None]
"""Share of the width, pixels from the top; None breaks a line."""

_WIDE = 10_000
"""Units across a stretched picture: a tenth of a pixel on the widest page."""
_DASHES = {"solid": "", "dash": "7 5", "dot": "2 4"}


def rect(span: tuple[float, float], top_px: float, height_px: float, color: str, tip: str = "") -> str:
    low, high = span
    place = f'x="{_percent(low)}" width="{_percent(high - low)}" y="{top_px:g}" height="{height_px:.4g}"'
    shown = f' data-tip="{escape(tip)}"' if tip else ""
    return f'<rect {place} fill="{color}"{shown}/>'


def dot(x: float, y_px: float, color: str) -> str:
    return f'<circle cx="{_percent(x)}" cy="{y_px:.5g}" r="2.6" fill="{color}"/>'


def text(
    x: float, y_px: float, content: str, *, anchor: str = "middle", dx_px: float = 0, kind: str = "", color: str = ""
) -> str:
    """Write a text; `anchor` is start, middle or end, `kind` a class of the style sheet."""
    style = (f' class="{kind}"' if kind else "") + (f' style="fill:{color}"' if color else "")
    shift = f' dx="{dx_px:g}"' if dx_px else ""
    return f'<text x="{_percent(x)}" y="{y_px:.5g}" text-anchor="{anchor}"{shift}{style}>{escape(content)}</text>'


def rule(y_px: float, kind: str) -> str:
    return f'<line x1="0%" x2="100%" y1="{y_px:.5g}" y2="{y_px:.5g}" class="{kind}"/>'


def line(points: Iterable[Point], height_px: int, color: str, dash: str) -> str:
    """Draw a line through points, broken where one has no height; a point alone becomes a short dash."""
    parts = [list(part) for known, part in itertools.groupby(points, lambda point: point[1] is not None) if known]
    path = "".join(_path(part) + ("h1" if len(part) == 1 else "") for part in parts)
    dashes = f' stroke-dasharray="{_DASHES[dash]}"' if _DASHES[dash] else ""
    style = f'fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round" stroke-linecap="round"'
    size = f'width="100%" height="{height_px}" viewBox="0 0 {_WIDE} {height_px}" preserveAspectRatio="none"'
    drawn = f'<path d="{path}" {style}{dashes} vector-effect="non-scaling-stroke"/>'
    return f'<svg {size} overflow="visible">{drawn}</svg>'


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{x * _WIDE:.0f} {y_px:.4g}" for x, y_px in points if y_px is not None)


def _percent(share: float) -> str:
    return f"{100 * share:.5g}%"


# Colours that colour-blind readers tell apart, legible on white and on near-black: hues after Okabe and Ito, "Color
# Universal Design", 2008. Two lightnesses for even and odd packs, so that neighbours show. Predicted is always dashed
# or grey; measured is filled and solid.


class KindStyle(NamedTuple):
    """Colours of tasks of one kind: even and odd packs, those too thin to tell apart, the text on the first two; and
    their name."""

    even: str
    odd: str
    thin: str
    text_even: str
    text_odd: str
    name: str


KIND_STYLES = {
    "F": KindStyle("#1f6fb5", "#7ab5e6", "#4c92cd", "#ffffff", "#0b2033", "forward"),
    "B": KindStyle("#d06a12", "#f2ae69", "#e18c3d", "#ffffff", "#3b1d02", "backward"),
    "I": KindStyle("#d06a12", "#f2ae69", "#e18c3d", "#ffffff", "#3b1d02", "backward: input gradient"),
    "W": KindStyle("#7d5233", "#b58d6d", "#996f50", "#ffffff", "#24150a", "backward: weight gradient"),
}
PREDICTED = "#8a919e"
MEASURED = "#2f7fd0"
SERIES = ("#2f7fd0", "#e07b1a", "#1b9e77", "#b55fa5", "#b59b00", "#4fb0d8", "#8a919e", "#d1495b")
MEMORY_COLORS = {
    "weights": "#3f6fa5",
    "gradients": "#86bdea",
    "optimizer_state": "#2a4a70",
    "activations_replay": "#e07b1a",
    "activations_recompute": "#f2ae69",
    "activations_offload": "#c9a77c",
    "keys_and_values": "#1b9e77",
    "key_value_gradients": "#7fd6b8",
    "states": "#a3c93a",
    "gathered_keys_and_values": "#17795a",
    "weight_gradient_inputs": "#8f5fc0",
    "recompute_buffers": "#c8a3e0",
    "offload_buffers": "#e0b7cf",
    "layer_buffers": "#98a2b0",
    "head_logits": "#c53347",
}
"""`MEMORY_KINDS`: what stays blue, activations orange, keys and values green, buffers violet, grey and red."""
SIDE_STYLES = {
    "recompute": ("#00000055", "recompute (front of a backward)"),
    "offload": ("#17a398", "offload to the host"),
    "reload": ("#c2438f", "reload from the host"),
    "reduction": ("#9d7fc9", "gradient reduction"),
    "optimizer": ("#6a4f96", "optimizer"),
    "gather": ("#b9a4d8", "gather of updated weights"),
}
"""`SIDE_KINDS` that are drawn: colour, and the legend's name."""
LENGTH_COLORS = {"documents": "#2f7fd0", "tokens": "#e07b1a", "attention_pairs": "#1b9e77"}
"""What is counted over document lengths."""
GROUP_COLORS = {
    "useful work": "#2f7fd0",
    "extra compute": "#e3c53d",
    "transfers": "#17795a",
    "pipeline bubble": "#c53347",
    "uneven packs": "#8f5fc0",
    "uneven replicas": "#e8833a",
    "gradients and update": "#7d5233",
}
"""Groups of causes (`CAUSE_GROUPS`)."""


def text_on(color: str) -> str:
    """Return black or white, whichever has the larger contrast of WCAG 2 on a colour."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


@dataclass(frozen=True)
class Scale:
    """Values between two bounds as shares of an axis."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high != self.low else 0.5


@dataclass(frozen=True)
class Tick:
    """A place on an axis and its label; minor ones are not shown on a narrow page."""

    at: float
    label: str
    is_minor: bool = False

    @property
    def kind(self) -> str:
        return "minor" if self.is_minor else ""


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten within the bounds."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.8)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_labels(values: Sequence[float], kind: str) -> list[str]:
    """Label an axis in one unit: "s", "%", "×", "count" or "" for plain numbers."""
    most = max((abs(value) for value in values), default=0.0)
    step = abs(values[1] - values[0]) if len(values) > 1 else most
    if kind == "s":
        unit_s, name = next(((u, n) for u, n in SECOND_UNITS if most >= u * 0.9999), SECOND_UNITS[-1])
        return [f"{_plain(value / unit_s, step / unit_s)} {name}" for value in values]
    if kind == "%":
        return [f"{_plain(100 * value, 100 * step)} %" for value in values]
    if kind == "count":
        return [format_count(value).replace(".00", "") for value in values]
    return [f"{_plain(value, step)}{kind}" for value in values]


def value_ticks(low: float, high: float, kind: str, count: int = 5) -> list[Tick]:
    """Return about `count` round ticks, labelled by `tick_labels`."""
    at = round_ticks(low, high, count)
    return [Tick(value, label) for value, label in zip(at, tick_labels(at, kind), strict=True)]


def step_ticks(first: int, last: int) -> list[Tick]:
    """Return ticks of whole steps, of which every other one is minor."""
    rounded = [round(value) for value in round_ticks(first, last, 10)]
    whole = list(dict.fromkeys(value for value in rounded if first <= value <= last)) or [first]
    return [Tick(value, f"{value:,}", is_minor=bool(i % 2)) for i, value in enumerate(whole)]


def named_ticks(labels: Mapping[float, str], most: int) -> list[Tick]:
    """Return a tick for each place with a label, of which at most `most` are not minor."""
    every = max(1, math.ceil(len(labels) / most))
    return [Tick(at, label, is_minor=bool(i % every)) for i, (at, label) in enumerate(labels.items())]


def _plain(value: float, step: float) -> str:
    """Format with as many decimals as tell two ticks apart."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(6, decimals)}f}" if value else "0"


@dataclass(frozen=True)
class NumberTable:
    """The numbers of a picture: headings, and rows, each with its name first."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A picture in HTML, and its numbers where they are few."""

    body: str
    numbers: NumberTable | None = None


@dataclass(frozen=True)
class Axes:
    """Scales, ticks and titles of a panel, and its height."""

    x: Scale
    y: Scale
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_title: str = ""
    y_title: str = ""
    height_px: int = 250

    def y_px(self, value: float) -> float:
        return self.height_px * (1 - self.y.share(value))


@dataclass(frozen=True)
class Curves:
    """Values of every series that pointing at a panel shows at the nearest x; `kind` as of `tick_labels`."""

    x_name: str
    x: Sequence[float]
    kind: str
    series: Sequence[tuple[str, str, Sequence[float | None]]]

    def as_json(self, axes: Axes) -> str:
        """Encode for the page's script, with places on the axes."""
        series = [{"name": n, "color": c, "values": [_short(v) for v in values]} for n, c, values in self.series]
        places = [round(axes.x.share(value), 5) for value in self.x]
        data = {"xName": self.x_name, "x": [_short(v) for v in self.x], "at": places, "kind": self.kind}
        return json.dumps(data | {"series": series}, separators=(",", ":"))


def panel(axes: Axes, marks: Iterable[str], label: str, curves: Curves | None = None) -> str:
    """Draw marks within axes; with `curves` they can be pointed at and read by arrow keys."""
    height, parts = axes.height_px, [rule(axes.y_px(tick.at), "grid") for tick in axes.y_ticks]
    for tick in axes.y_ticks:
        parts.append(text(0, axes.y_px(tick.at) + 4, tick.label, anchor="end", dx_px=-8, kind=tick.kind))
    parts += [text(axes.x.share(tick.at), height + 17, tick.label, kind=tick.kind) for tick in axes.x_ticks]
    parts += [rule(height, "axis"), *marks]
    title = f'<div class="y-title">{escape(axes.y_title)}</div>' if axes.y_title else ""
    what = f'role="img" aria-label="{escape(label)}"'
    if curves:
        # JSON within single quotes.
        points = curves.as_json(axes).replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")
        what = f'role="group" aria-roledescription="chart" aria-label="{escape(label)}; arrow keys read values"'
        what += f" data-curves='{points}' tabindex=\"0\""
    picture = _plot(height, what, "".join(parts))
    return f'{title}<div class="panel">{picture}</div>{_x_title(axes.x_title)}'


def _plot(height_px: int, attributes: str, body: str) -> str:
    return f'<svg class="plot" width="100%" height="{height_px}" overflow="visible" {attributes}>{body}</svg>'


def _x_title(title: str) -> str:
    return f'<div class="x-title">{escape(title)}</div>' if title else ""


def rows_chart(
    rows: Iterable[tuple[str, str, str]],
    row_px: int,
    label: str,
    *,
    x: Scale,
    ticks: Sequence[Tick],
    title: str,
    names_px: int,
    notes_px: int,
) -> str:
    """Draw rows of (name, marks, note) on one axis; on a narrow page name and note are above the marks."""
    places = [_percent(x.share(tick.at)) for tick in ticks]
    lines = "".join(f'<line x1="{at}" x2="{at}" y1="0" y2="{row_px:g}" class="grid"/>' for at in places)
    shown = [("row", name, _plot(row_px, 'aria-hidden="true"', lines + marks), note) for name, marks, note in rows]
    labels = "".join(text(x.share(tick.at), 14, tick.label, kind=tick.kind) for tick in ticks)
    shown.append(("row ticks", "", _plot(20, 'aria-hidden="true"', labels), ""))
    parts = (
        f'<div class="{kind}"><span class="name">{escape(name)}</span>{picture}'
        f'<span class="value">{escape(note)}</span></div>'
        for kind, name, picture, note in shown
    )
    style = f"--names:{names_px}px;--notes:{notes_px}px"
    rows_html = f'<div class="rows" role="group" aria-label="{escape(label)}" style="{style}">{"".join(parts)}</div>'
    return rows_html + _x_title(title)


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Draw a legend of (name, colour, kind); kinds are "fill", or a line's dash."""
    parts = []
    for name, color, kind in entries:
        style = f"background:{color}" if kind == "fill" else f"border-top:2px {_BORDERS[kind]} {color}"
        of_line = "" if kind == "fill" else ' class="line"'
        parts.append(f'<span><i{of_line} style="{style}"></i>{escape(name)}</span>')
    return f'<div class="legend">{"".join(parts)}</div>' if parts else ""


_BORDERS = {"solid": "solid", "dash": "dashed", "dot": "dotted"}


def _short(value: float | None) -> float | None:
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None
