"""The Gantt chart of a step: one row a pipeline rank, one panel a timeline, one time axis for all.

Bars carry numbers only (typed columns), tooltips are a template over them: 32,000 bars (16 ranks, 512 packs,
predicted and measured) are about 4 MB of page and draw in about a second in Chromium on one old core. There
is one bar trace for each kind and pack parity, whatever the number of packs. Above `MAX_BARS` whole replicas
are left out, never single tasks: `choose_replicas` keeps those that end last, which decide the step time.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from evenload.report.pack_label import PackKey, PackLabel
from evenload.report.palette import IDLE, KIND_STYLES
from evenload.report.units import format_change, format_percent, format_seconds
from evenload.types.pack_times import replica_ends
from evenload.types.timeline import KINDS, Timeline

MAX_BARS = 40_000
# Above this many bars pack numbers would not fit into them, and text is the slowest part of drawing.
_MAX_BARS_WITH_TEXT = 800
_BAR_WIDTH = 0.86
# plotly.js widens opaque bars under two pixels to whole pixels; in a dense step the kind drawn last would then
# cover the other. It draws true widths when a colour is not quite opaque and `bargap` is not zero.
_TRUE_WIDTH_ALPHA = "fe"
# Rows between replicas, so that groups show.
_REPLICA_GAP = 0.5
_TOP_PX, _BOTTOM_PX, _PANEL_GAP_PX = 68, 50, 62

Lane = tuple[int, int]
"""(dp rank, pipeline rank)."""


def timeline_figure(
    timelines: Mapping[str, Timeline],
    labels: Mapping[PackKey, PackLabel] | None = None,
    dp_ranks: Sequence[int] | None = None,
) -> go.Figure:
    """Panels of timelines, first on top, with a shared time axis in seconds.

    Args:
        timelines: by name, usually "predicted" then "measured"; at least one.
        labels: content of the packs for tooltips; see `label_packs`.
        dp_ranks: replicas to draw; all when None.
    """
    labels = labels or {}
    lanes = _place_lanes(timelines.values(), dp_ranks)
    panel_px = max(48, _row_height_px(lanes) * _num_rows(lanes))
    height = _TOP_PX + _BOTTOM_PX + panel_px * len(timelines) + _PANEL_GAP_PX * (len(timelines) - 1)
    figure = make_subplots(
        rows=len(timelines),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=_PANEL_GAP_PX / (height - _TOP_PX - _BOTTOM_PX) if len(timelines) > 1 else 0,
    )
    with_text = sum(timeline.num_tasks for timeline in timelines.values()) <= _MAX_BARS_WITH_TEXT
    in_legend: set[str] = set()
    for panel, (name, timeline) in enumerate(timelines.items(), start=1):
        figure.add_trace(_idle_trace(timeline, lanes, show_legend=panel == 1), row=panel, col=1)
        for trace in _task_traces(timeline, lanes, labels, with_text):
            group = str(trace.legendgroup)
            trace.showlegend = group not in in_legend
            in_legend.add(group)
            figure.add_trace(trace, row=panel, col=1)
        _label_panel(figure, panel, name, timeline, timelines)
    _set_axes(figure, lanes, len(timelines), max(timeline.step_time_s for timeline in timelines.values()))
    figure.update_layout(
        barmode="overlay",
        bargap=1 - _BAR_WIDTH,
        height=height,
        margin={"l": 104 if len({dp for dp, _ in lanes}) > 1 else 64, "r": 16, "t": _TOP_PX, "b": _BOTTOM_PX},
        hovermode="closest",
        uniformtext={"mode": "hide", "minsize": 9},
        dragmode="zoom",
    )
    return figure


def choose_replicas(timelines: Sequence[Timeline], max_bars: int = MAX_BARS) -> list[int]:
    """Data-parallel ranks to draw, ascending: all, or of those that end last as many as `max_bars` allows.

    At least one is kept. Ends are of the last timeline given (measured, where there is one).
    """
    if not timelines:
        return []
    ends = replica_ends(timelines[-1])
    chosen: list[int] = []
    num_bars = 0
    for dp_rank in sorted(ends, key=lambda rank: (-ends[rank], rank)):
        num_bars += sum(int((timeline.dp_rank == dp_rank).sum()) for timeline in timelines)
        if chosen and num_bars > max_bars:
            break
        chosen.append(dp_rank)
    return sorted(chosen)


def _place_lanes(timelines: Iterable[Timeline], dp_ranks: Sequence[int] | None) -> dict[Lane, float]:
    """Lanes in order of (dp rank, pipeline rank), each with its row from the top."""
    lanes = {
        lane for timeline in timelines for lane in zip(timeline.dp_rank.tolist(), timeline.rank.tolist(), strict=True)
    }
    shown = sorted(lane for lane in lanes if dp_ranks is None or lane[0] in dp_ranks)
    replicas = sorted({dp for dp, _ in shown})
    return {lane: row + _REPLICA_GAP * replicas.index(lane[0]) for row, lane in enumerate(shown)}


def _num_rows(lanes: Mapping[Lane, float]) -> float:
    return max(lanes.values(), default=0.0) + 1


def _row_height_px(lanes: Mapping[Lane, float]) -> int:
    return 30 if len(lanes) <= 8 else 22 if len(lanes) <= 16 else 15 if len(lanes) <= 48 else 11


def _idle_trace(timeline: Timeline, lanes: Mapping[Lane, float], show_legend: bool) -> go.Bar:
    """A grey track from 0 to the end of the step under the tasks: what stays grey is not computing packs."""
    return go.Bar(
        orientation="h",
        y=np.array(list(lanes.values())),
        x=np.full(len(lanes), timeline.step_time_s),
        base=np.zeros(len(lanes)),
        width=_BAR_WIDTH,
        marker={"color": IDLE, "line": {"width": 0}},
        hoverinfo="skip",
        name="idle, reduction, optimizer",
        legendgroup="idle",
        legendrank=2000,
        showlegend=show_legend,
    )


def _task_traces(
    timeline: Timeline, lanes: Mapping[Lane, float], labels: Mapping[PackKey, PackLabel], with_text: bool
) -> list[go.Bar]:
    row = np.array(
        [lanes.get(lane, -1.0) for lane in zip(timeline.dp_rank.tolist(), timeline.rank.tolist(), strict=True)],
        dtype=np.float64,
    )
    traces = []
    for code, kind in enumerate(KINDS):
        for parity in (0, 1):
            chosen = np.flatnonzero((timeline.kind == code) & (timeline.pack % 2 == parity) & (row >= 0))
            if len(chosen):
                traces.append(_task_trace(timeline, chosen, row[chosen], kind, parity, labels, with_text))
    return traces


def _task_trace(
    timeline: Timeline,
    chosen: NDArray[np.intp],
    row: NDArray[np.float64],
    kind: str,
    parity: int,
    labels: Mapping[PackKey, PackLabel],
    with_text: bool,
) -> go.Bar:
    style = KIND_STYLES[kind]
    start_s, end_s = timeline.start_s[chosen], timeline.end_s[chosen]
    columns = [timeline.stage[chosen], timeline.pack[chosen], start_s, end_s, end_s - start_s]
    template = (
        f"<b>%{{customdata[0]}}{kind}%{{customdata[1]}}</b>  {style.name}"
        "<br>stage %{customdata[0]}, pack %{customdata[1]}"
    )
    texts = None
    if labels:
        direction = "forward" if kind == "F" else "backward"
        found = [
            labels.get((dp_rank, direction, pack))
            for dp_rank, pack in zip(timeline.dp_rank[chosen].tolist(), timeline.pack[chosen].tolist(), strict=True)
        ]
        # Tasks without a label keep NaN, which prints as such: a missing label is never shown as 0 tokens.
        columns += [np.array([label[i] if label else np.nan for label in found], dtype=np.float64) for i in range(3)]
        template += (
            "<br>%{customdata[7]:,} tokens of %{customdata[5]:,} documents, %{customdata[6]:,} of them sliced"
            "<br>%{hovertext}"
        )
        texts = [escape(label.text, quote=False) if label else "" for label in found]
    template += "<br>%{customdata[4]:.4~s}s  (%{customdata[2]:.5~s}s to %{customdata[3]:.5~s}s)<extra></extra>"
    return go.Bar(
        orientation="h",
        y=row,
        x=end_s - start_s,
        base=start_s,
        width=_BAR_WIDTH,
        marker={"color": (style.odd if parity else style.even) + _TRUE_WIDTH_ALPHA, "line": {"width": 0}},
        customdata=np.column_stack(columns).astype(np.float64),
        hovertext=texts,
        hovertemplate=template,
        text=timeline.pack[chosen].astype(str) if with_text else None,
        textposition="inside" if with_text else "none",
        insidetextanchor="middle",
        textangle=0,
        constraintext="inside",
        insidetextfont={"color": style.text_odd if parity else style.text_even, "size": 11},
        name=style.name,
        legendgroup=kind,
        legendrank=1000 + KINDS.index(kind),
    )


def _label_panel(
    figure: go.Figure, panel: int, name: str, timeline: Timeline, all_timelines: Mapping[str, Timeline]
) -> None:
    """The panel's heading: which origin, how long, how much bubble, and how far measured is from predicted."""
    text = f"<b>{escape(name, quote=False).capitalize()}</b>   step {format_seconds(timeline.step_time_s)}"
    predicted = all_timelines.get("predicted")
    if name == "measured" and predicted is not None and predicted.step_time_s > 0:
        text += f" ({format_change(timeline.step_time_s / predicted.step_time_s - 1)} against predicted)"
    text += f"   bubble {format_percent(timeline.bubble_fraction())}"
    axis = "" if panel == 1 else str(panel)
    figure.add_annotation(
        text=text,
        xref="paper",
        yref=f"y{axis} domain",
        x=0,
        y=1,
        xanchor="left",
        yanchor="bottom",
        yshift=4,
        showarrow=False,
        font={"size": 13},
    )


def _set_axes(figure: go.Figure, lanes: Mapping[Lane, float], num_panels: int, longest_s: float) -> None:
    several = len({dp for dp, _ in lanes}) > 1
    first = dict(reversed(list(lanes)))
    names = {
        (dp, rank): f"dp {dp} · rank {rank}" if several and first[dp] == rank else f"rank {rank}" for dp, rank in lanes
    }
    # Every name when rows are high enough for one; else the first of each replica.
    dense = _row_height_px(lanes) < 15
    shown = [(dp, rank) for dp, rank in lanes if not dense or first[dp] == rank]
    figure.update_yaxes(
        tickvals=[lanes[lane] for lane in shown],
        ticktext=[names[lane] for lane in shown],
        range=[_num_rows(lanes) - 0.5, -0.5],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
        ticks="",
        ticklabelstandoff=4,
        tickfont={"size": 11},
    )
    figure.update_xaxes(
        range=[0, longest_s * 1.005],
        minallowed=-0.02 * longest_s,
        maxallowed=longest_s * 1.03,
        tickformat="~s",
        ticksuffix="s",
        zeroline=False,
        showgrid=True,
        showticklabels=True,
    )
    figure.update_xaxes(title_text="time since the step began", row=num_panels, col=1)
