"""Marks of a picture as SVG text, in coordinates that follow the width of the page without a script.

Across, a place is a share of the picture's width (0 to 1) and becomes a percentage; down, it is pixels. So bars, dots
and texts move with the page while letters and line widths stay as they are. Lines and shapes have no percentages in
SVG: they stand in an inner picture that is stretched, with strokes that are not. All texts are escaped here. Why no
library: docs/decisions/21-documentation-and-reports.md.
"""

from collections.abc import Iterable, Sequence
from html import escape

Point = tuple[float, float | None]
"""Share of the width, pixels from the top; None breaks a line."""

_WIDE = 10_000
"""Units across a stretched picture: a tenth of a pixel on the widest page."""
_DASHES = {"solid": "", "dash": "7 5", "dot": "2 4", "dashdot": "8 4 2 4"}


def rect(span: tuple[float, float], top_px: float, height_px: float, color: str, tip: str = "") -> str:
    """A bar over a span of the width."""
    low, high = span
    place = f'x="{_percent(low)}" width="{_percent(high - low)}" y="{top_px:g}" height="{height_px:.4g}"'
    return f'<rect {place} fill="{color}"{_tip(tip)}/>'


def dot(x: float, y_px: float, color: str, *, hollow: bool = False, radius_px: float = 3.2, tip: str = "") -> str:
    look = f'fill="none" stroke="{color}" stroke-width="1.4"' if hollow else f'fill="{color}"'
    return f'<circle cx="{_percent(x)}" cy="{y_px:.5g}" r="{radius_px:g}" {look}{_tip(tip)}/>'


def triangle(x: float, y_px: float, color: str, *, up: bool, tip: str = "") -> str:
    path = "M-7 5H7L0 -7Z" if up else "M-7 -5H7L0 7Z"
    body = f'<path d="{path}" fill="{color}"{_tip(tip)}/>'
    return f'<svg x="{_percent(x)}" y="{y_px:.5g}" overflow="visible">{body}</svg>'


def text(
    x: float, y_px: float, words: str, *, anchor: str = "middle", dx_px: float = 0, kind: str = "", color: str = ""
) -> str:
    """Words at a place; `anchor` is start, middle or end, `kind` a class of the style sheet."""
    look = f' class="{kind}"' if kind else ""
    look += f' style="fill:{color}"' if color else ""
    shift = f' dx="{dx_px:g}"' if dx_px else ""
    return f'<text x="{_percent(x)}" y="{y_px:.5g}" text-anchor="{anchor}"{shift}{look}>{escape(words)}</text>'


def rule(span: tuple[float, float], y_px: float, kind: str) -> str:
    """A horizontal line."""
    low, high = span
    return f'<line x1="{_percent(low)}" x2="{_percent(high)}" y1="{y_px:.5g}" y2="{y_px:.5g}" class="{kind}"/>'


def upright(x: float, top_px: float, bottom_px: float, kind: str) -> str:
    """A vertical line."""
    at = _percent(x)
    return f'<line x1="{at}" x2="{at}" y1="{top_px:g}" y2="{bottom_px:g}" class="{kind}"/>'


def line(points: Iterable[Point], height_px: int, color: str, dash: str = "solid", width_px: float = 2) -> str:
    """A line through points, broken where one has no height; a point alone becomes a short dash."""
    parts: list[list[Point]] = [[]]
    for point in points:
        if point[1] is None:
            parts.append([])
        else:
            parts[-1].append(point)
    path = "".join(_path(part) + ("h1" if len(part) == 1 else "") for part in parts if part)
    dashes = f' stroke-dasharray="{_DASHES[dash]}"' if _DASHES[dash] else ""
    look = f'fill="none" stroke="{color}" stroke-width="{width_px:g}" stroke-linejoin="round" stroke-linecap="round"'
    return _stretched(f'<path d="{path}" {look}{dashes} vector-effect="non-scaling-stroke"/>', height_px)


def shape(points: Sequence[Point], height_px: int, color: str, fill: str, tip: str = "") -> str:
    """A closed outline."""
    look = f'fill="{fill}" stroke="{color}" stroke-width="1.2"'
    path = f'<path d="{_path(points)}Z" {look}{_tip(tip)} vector-effect="non-scaling-stroke"/>'
    return _stretched(path, height_px)


def stairs(points: Iterable[tuple[float, float]]) -> list[Point]:
    """A line that keeps its height until the next point."""
    found: list[Point] = []
    for x, y_px in points:
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y_px))
    return found


def _path(points: Iterable[Point]) -> str:
    return "M" + "L".join(f"{x * _WIDE:.0f} {y_px:.4g}" for x, y_px in points if y_px is not None)


def _stretched(body: str, height_px: int) -> str:
    size = f'width="100%" height="{height_px}" viewBox="0 0 {_WIDE} {height_px}"'
    return f'<svg {size} preserveAspectRatio="none" overflow="visible">{body}</svg>'


def _percent(share: float) -> str:
    return f"{100 * share:.5g}%"


def _tip(words: str) -> str:
    return f' data-tip="{escape(words)}"' if words else ""
