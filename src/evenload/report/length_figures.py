"""Pictures of document lengths: shares by length class, cumulative shares, what windows cut.

All length axes are logarithmic. Colours follow the three things counted: documents blue, tokens orange, attention
work green. Of each the classes have an axis of their own, and a class far above all others has a bar that is broken:
one document of ten million tokens holds most of the attention work, and would press everything else to the ground.
"""

from collections.abc import Sequence

from evenload.report.axes import Scale, Tick, class_ticks, length_ticks, round_ticks, tick_labels
from evenload.report.figure import Axes, Curves, Figure, NumberTable, legend, panel
from evenload.report.palette import LENGTH_COLORS
from evenload.report.svg_marks import line, rect, stairs, text
from evenload.report.units import format_power_of_two, format_share
from evenload.types.length_profile import LengthProfile
from evenload.types.length_unit import LengthUnit, in_unit

READ_CLASSES = (
    "Documents by length, in classes of powers of two: how many documents, their tokens, and the (query, key) pairs of "
    "causal attention, each with an axis of its own. Where the third stands far right of the first, a few long "
    "documents decide how long a step takes, and packing by token counts leaves devices waiting."
)
_READ_BROKEN = " A <b>broken bar</b> is longer than drawn; its share stands on it."
READ_CUMULATIVE = (
    "The share of everything that lies in documents up to a length. The wider the gap between the curves, the more "
    "there is to win by balancing work instead of documents."
)
READ_WINDOWS = (
    "What a context window does to this data. <b>Blue</b>: documents that do not fit. <b>Orange</b>: tokens after the "
    "window, lost where documents are truncated. <b>Green</b>: attention between pieces, lost where documents are "
    "split. Evenload trains documents whole up to <code>--context</code>."
)
COUNTED = {"documents": "documents", "tokens": "tokens", "attention_pairs": "attention work"}
"""What is counted over lengths: fields of `LengthProfile`, and their names."""
WINDOW_CUTS = (
    ("longer_documents", "documents", "documents longer"),
    ("tokens_beyond", "tokens", "tokens beyond"),
    ("attention_pairs_across", "attention_pairs", "attention across pieces"),
)
"""What a window cuts: field of `WindowCut`, of the total that it is a share of, and name."""
_CUT_MEANINGS = (
    "of documents are longer",
    "of tokens lie beyond: truncating loses them",
    "of attention is across pieces: splitting loses it",
)
_CLASS_PX, _SHARES_PX = 104, 260
_MOST_OVER_SECOND = 2.5
"""A class this many times the next one has a broken bar."""
_ROOM = 1.3


def axis_end(shares: Sequence[float]) -> float:
    """Where the axis of a histogram ends: above the largest share, or above the second, if that were pressed flat."""
    ordered = sorted(shares, reverse=True)
    second = ordered[1] if len(ordered) > 1 else 0.0
    is_alone = second > 0 and ordered[0] > _MOST_OVER_SECOND * second
    return (second * 1.5 if is_alone else ordered[0]) * _ROOM or 1.0


def has_broken_bar(profile: LengthProfile) -> bool:
    return any(max(shares) > axis_end(shares) for shares in (_shares(profile, key) for key in COUNTED))


def read_classes(profile: LengthProfile) -> str:
    """How to read `length_classes_figure`."""
    return READ_CLASSES + (_READ_BROKEN if has_broken_bar(profile) else "")


def length_classes_figure(profile: LengthProfile, unit: LengthUnit = "tokens") -> Figure:
    """Share of documents, tokens and attention work by length class: a panel each over the same classes."""
    starts = [format_power_of_two(c.start) for c in profile.classes]
    names = [f"{format_power_of_two(c.start)} to {format_power_of_two(c.stop)}" for c in profile.classes]
    panels = []
    for key, name in COUNTED.items():
        shares = _shares(profile, key)
        is_last = key == "attention_pairs"
        axes = _class_axes(shares, starts if is_last else [], _CLASS_PX)
        title = in_unit("length from (tokens; every class ends where the next begins)", unit) if is_last else ""
        marks = []
        for i, (share, one) in enumerate(zip(shares, profile.classes, strict=True)):
            count = getattr(one, key)
            tip = in_unit(f"{names[i]} tokens: {share:.2%} of {name} ({count:,})", unit)
            marks += _class_bar(axes, i, share, LENGTH_COLORS[key], tip)
        label = in_unit(f"share of {name} by length: {_told(names, shares)}", unit)
        heading = f'<div class="panel-title">{in_unit(name, unit)}</div>'
        panels.append(heading + panel(_titled(axes, title), marks, label))
    rows = [
        (name, *(f"{getattr(one, key):,}, {format_share(shares[key][i])}" for key in COUNTED))
        for shares in [{key: _shares(profile, key) for key in COUNTED}]
        for i, (name, one) in enumerate(zip(names, profile.classes, strict=True))
    ]
    headings = (in_unit("length (tokens)", unit), *(in_unit(name, unit) for name in COUNTED.values()))
    return Figure(
        body="".join(panels),
        label=in_unit("shares of documents, tokens and attention work by length class", unit),
        numbers=NumberTable(headings, tuple(rows)),
    )


def cumulative_lengths_figure(profile: LengthProfile, unit: LengthUnit = "tokens") -> Figure:
    """Share of documents, tokens and attention work in documents up to a length."""
    ticks = length_ticks(profile.shortest, profile.longest)
    axes = Axes(
        x=Scale(ticks[0].at, ticks[-1].at, is_log=True),
        y=Scale(0, 1.02),
        x_ticks=ticks,
        y_ticks=_share_ticks(1.0),
        x_title=in_unit("up to this length (tokens)", unit),
        height_px=_SHARES_PX,
    )
    marks, series = [], []
    for key, name in COUNTED.items():
        values = [getattr(point, key) for point in profile.cumulative]
        points = ((axes.x.share(p.length), axes.y_px(v)) for p, v in zip(profile.cumulative, values, strict=True))
        marks.append(line(stairs(points), axes.height_px, LENGTH_COLORS[key]))
        series.append((in_unit(name, unit), LENGTH_COLORS[key], values))
    curves = Curves("up to", [point.length for point in profile.cumulative], "%", series)
    label = in_unit("cumulative shares of documents, tokens and attention work over length", unit)
    keys = legend((name, color, "solid") for name, color, _ in series)
    return Figure(body=keys + panel(axes, marks, label, curves), label=label)


def window_cuts_figure(profile: LengthProfile, unit: LengthUnit = "tokens") -> Figure:
    """What each window cuts: documents longer than it, tokens beyond it, attention across its pieces."""
    windows = [format_power_of_two(cut.window) for cut in profile.windows]
    columns = [
        [getattr(cut, key) / getattr(profile, total) for cut in profile.windows] for key, total, _ in WINDOW_CUTS
    ]
    axes = Axes(
        x=Scale(-0.5, len(windows) - 0.5),
        y=Scale(0, (max(map(max, columns)) or 1.0) * 1.05),
        x_ticks=class_ticks(windows),
        y_ticks=_share_ticks((max(map(max, columns)) or 1.0) * 1.05),
        x_title=in_unit("context window (tokens)", unit),
        y_title="share cut",
        height_px=_SHARES_PX,
    )
    marks = []
    kinds = zip(WINDOW_CUTS, columns, _CUT_MEANINGS, strict=True)
    for position, ((key, total, _), shares, meaning) in enumerate(kinds):
        for i, (share, cut) in enumerate(zip(shares, profile.windows, strict=True)):
            tip = in_unit(f"window {windows[i]}: {share:.2%} {meaning} ({getattr(cut, key):,})", unit)
            low = i - 0.36 + 0.24 * position
            span = axes.x.share(low), axes.x.share(low + 0.23)
            marks.append(rect(span, axes.y_px(share), axes.height_px - axes.y_px(share), LENGTH_COLORS[total], tip))
    label = in_unit("what each context window cuts: documents, tokens, attention work", unit)
    names = [in_unit(name, unit) for _, _, name in WINDOW_CUTS]
    rows = []
    for i, (window, cut) in enumerate(zip(windows, profile.windows, strict=True)):
        counts = [getattr(cut, key) for key, _, _ in WINDOW_CUTS]
        cells = (f"{count:,}, {format_share(column[i])}" for count, column in zip(counts, columns, strict=True))
        rows.append((window, *cells))
    keys = legend((name, LENGTH_COLORS[total], "fill") for name, (_, total, _) in zip(names, WINDOW_CUTS, strict=True))
    numbers = NumberTable((in_unit("window (tokens)", unit), *names), tuple(rows))
    return Figure(body=keys + panel(axes, marks, label), label=label, numbers=numbers)


def _shares(profile: LengthProfile, key: str) -> list[float]:
    return [getattr(one, key) / getattr(profile, key) for one in profile.classes]


def _class_axes(shares: Sequence[float], labels: Sequence[str], height_px: int) -> Axes:
    end = axis_end(shares)
    return Axes(
        x=Scale(-0.5, len(shares) - 0.5),
        y=Scale(0, end),
        x_ticks=class_ticks(labels),
        y_ticks=_share_ticks(end, 3),
        height_px=height_px,
    )


def _class_bar(axes: Axes, at: int, share: float, color: str, tip: str) -> list[str]:
    """A bar with its share over it; where it leaves the axis two gaps say that it goes on."""
    if not share:
        return []
    span = axes.x.share(at - 0.4), axes.x.share(at + 0.4)
    middle = (span[0] + span[1]) / 2
    is_broken = share > axes.y.high
    # Something is never invisible.
    top = 16.0 if is_broken else min(axes.y_px(share), axes.height_px - 1)
    marks = [rect(span, top, axes.height_px - top, color, tip)]
    if is_broken:
        marks += [rect((span[0] - 0.002, span[1] + 0.002), y, 2.5, "var(--card)") for y in (top + 12, top + 18)]
    words = f"{100 * share:.1f}" if share >= 0.0005 else "<0.1"
    kind = "on-bar broken" if is_broken else "on-bar"
    marks.append(text(middle, top - 4, f"{words} %" if is_broken else words, kind=kind))
    return marks


def _share_ticks(end: float, count: int = 5) -> list[Tick]:
    at = round_ticks(0, end, count)
    return [Tick(value, label) for value, label in zip(at, tick_labels(at, "%"), strict=True)]


def _titled(axes: Axes, title: str) -> Axes:
    return Axes(axes.x, axes.y, axes.x_ticks, axes.y_ticks, title, height_px=axes.height_px)


def _told(names: Sequence[str], shares: Sequence[float]) -> str:
    most = max(range(len(shares)), key=shares.__getitem__)
    return f"most, {format_share(shares[most])}, from {names[most]} tokens"
