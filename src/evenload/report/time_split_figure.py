"""Where the predicted time of a step goes: one stacked bar a strategy, its parts adding up to the step time.

Useful work is blue; what computing costs on top of it is light blue to yellow; waiting inside pipelines red to violet,
transfers green, the end of the step brown. The same cause has the same colour in every report.
"""

from collections.abc import Mapping

from evenload.report.axes import Scale, Tick, round_ticks, tick_labels
from evenload.report.figure import Figure, NumberTable, legend, names_width_px, rows_chart
from evenload.report.palette import CAUSE_COLORS, text_on
from evenload.report.svg_marks import rect, text
from evenload.report.units import format_percent, format_seconds
from evenload.types.time_split import CAUSE_LABELS, TimeSplit

_ROW_PX, _BAR_PX = 34, 24
# A part thinner than this share of the longest bar cannot be seen or pointed at.
_LEAST_NAMED_SHARE = 0.0005
# A part this wide has room for its share of the step.
_LEAST_LABELLED_SHARE, _LEAST_ON_NARROW = 0.055, 0.14


def time_split_figure(splits: Mapping[str, TimeSplit]) -> Figure:
    """Stacked bars, first strategy on top; causes that cost nothing anywhere are left out."""
    longest_s = max(split.total_s() for split in splits.values()) or 1.0
    fields = [
        field
        for field in CAUSE_LABELS
        if max(getattr(split, field) for split in splits.values()) >= _LEAST_NAMED_SHARE * longest_s
    ]
    scale = Scale(0, longest_s * 1.01)
    rows = [(name, _bar(split, fields, scale), _note(split)) for name, split in splits.items()]
    at = round_ticks(0, scale.high)
    shown = zip(at, tick_labels(at, "s"), strict=True)
    ticks = [Tick(value, label, is_minor=bool(i % 2)) for i, (value, label) in enumerate(shown)]
    label = "; ".join(f"{name}: {_note(split)}" for name, split in splits.items())
    chart = rows_chart(
        rows,
        _ROW_PX,
        label,
        x=scale,
        ticks=ticks,
        title="predicted seconds of a step, mean over devices and steps",
        names_px=names_width_px(splits),
        notes_px=196,
    )
    keys = legend((CAUSE_LABELS[field], CAUSE_COLORS[field], "fill") for field in fields)
    return Figure(body=keys + chart, label=label, numbers=_numbers(splits, fields))


def _bar(split: TimeSplit, fields: list[str], scale: Scale) -> str:
    parts = []
    before_s = 0.0
    for field in fields:
        seconds = getattr(split, field)
        if seconds <= 0:
            continue
        span = scale.share(before_s), scale.share(before_s + seconds)
        share = format_percent(seconds / split.total_s())
        tip = f"{CAUSE_LABELS[field]}: {format_seconds(seconds)}, {share} of the step"
        parts.append(rect(span, (_ROW_PX - _BAR_PX) / 2, _BAR_PX, CAUSE_COLORS[field], tip))
        if span[1] - span[0] >= _LEAST_LABELLED_SHARE:
            middle = (span[0] + span[1]) / 2
            kind = "inside" if span[1] - span[0] >= _LEAST_ON_NARROW else "inside minor"
            parts.append(text(middle, _ROW_PX / 2 + 4, share, kind=kind, color=text_on(CAUSE_COLORS[field])))
        before_s += seconds
    return "".join(parts)


def _note(split: TimeSplit) -> str:
    total_s = split.total_s()
    useful = format_percent(split.useful_s / total_s if total_s else None)
    return f"{format_seconds(total_s)} predicted, {useful} useful"


def _numbers(splits: Mapping[str, TimeSplit], fields: list[str]) -> NumberTable:
    rows = [
        (CAUSE_LABELS[field], *(_cell(getattr(split, field), split.total_s()) for split in splits.values()))
        for field in fields
    ]
    totals = ("step", *(format_seconds(split.total_s()) for split in splits.values()))
    return NumberTable(headings=("cause", *splits), rows=(*rows, totals))


def _cell(seconds: float, total_s: float) -> str:
    return f"{format_seconds(seconds)}, {format_percent(seconds / total_s)}" if seconds > 0 and total_s else "·"
