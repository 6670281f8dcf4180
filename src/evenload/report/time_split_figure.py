"""Where the predicted time of a step goes: one stacked bar a strategy, its parts adding up to the step time.

Useful work is blue; what computing costs on top of it is light blue to yellow; waiting inside pipelines red to violet,
transfers green, the end of the step brown. The same cause has the same colour in every report.
"""

from collections.abc import Mapping
from html import escape

import plotly.graph_objects as go

from evenload.report.palette import CAUSE_COLORS
from evenload.report.units import format_percent, format_seconds
from evenload.types.time_split import CAUSE_LABELS, TimeSplit

_ROW_PX = 34
# Of one row of legend; the page makes room for more.
_TOP_PX, _BOTTOM_PX = 36, 50
# A part thinner than this share of the longest bar cannot be seen or pointed at.
_LEAST_NAMED_SHARE = 0.0005


def time_split_figure(splits: Mapping[str, TimeSplit]) -> go.Figure:
    """Stacked bars, first strategy on top; causes that cost nothing anywhere are left out."""
    figure = go.Figure()
    names = [escape(name, quote=False) for name in splits]
    longest_s = max(split.total_s() for split in splits.values())
    for field, label in CAUSE_LABELS.items():
        seconds = [getattr(split, field) for split in splits.values()]
        if max(seconds) < _LEAST_NAMED_SHARE * longest_s:
            continue
        texts = [
            f"{format_seconds(part)}, {format_percent(part / split.total_s() if split.total_s() else None)} of the step"
            for part, split in zip(seconds, splits.values(), strict=True)
        ]
        figure.add_trace(
            go.Bar(
                orientation="h",
                x=seconds,
                y=names,
                name=label,
                customdata=texts,
                marker={"color": CAUSE_COLORS[field], "line": {"width": 0}},
                hovertemplate=f"<b>{label}</b>: %{{customdata}}<extra>%{{y}}</extra>",
            )
        )
    for name, split in zip(names, splits.values(), strict=True):
        useful = split.useful_s / split.total_s() if split.total_s() else None
        figure.add_annotation(
            x=split.total_s(),
            y=name,
            text=f"{format_seconds(split.total_s())} predicted, {format_percent(useful)} useful",
            xanchor="left",
            xshift=6,
            showarrow=False,
            font={"size": 11.5},
        )
    figure.update_layout(
        barmode="stack",
        bargap=0.3,
        height=_TOP_PX + _BOTTOM_PX + _ROW_PX * len(splits),
        margin={"l": min(220, 28 + 7 * max(map(len, names))), "r": 16, "t": _TOP_PX, "b": _BOTTOM_PX},
        hovermode="closest",
        legend={"traceorder": "normal"},
    )
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, zeroline=False, fixedrange=True)
    # Room on the right for the numbers.
    figure.update_xaxes(
        range=[0, longest_s * 1.3 or 1],
        tickformat="~s",
        ticksuffix="s",
        zeroline=False,
        title_text="predicted seconds of a step, mean over devices and steps",
    )
    return figure
