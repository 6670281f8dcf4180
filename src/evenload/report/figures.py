"""Curves and distributions of runs: loss, speed, step time, pack times, memory.

Every builder returns a plotly figure with transparent background and without fonts or grid colours of its
own, so that the page can dress it for light and dark. Numbers are drawn as they are: no smoothing, no
resampling. Predicted is dashed, hollow or grey; measured is solid. User texts are escaped, because plotly
reads a small HTML subset in names.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from evenload.errors import DataError
from evenload.report.metrics_file import MetricRow, latest_per_step
from evenload.report.palette import LIMIT, MEASURED, PREDICTED, rank_color, series_style
from evenload.report.units import format_bytes, format_ratio
from evenload.types.micropack import Direction
from evenload.types.pack_times import PackTimes, pack_times
from evenload.types.timeline import Timeline

_CURVE_PX = 300
_GIB = 2**30
# From this many steps on markers hide the line.
_MAX_STEPS_WITH_MARKERS = 80
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def loss_figure(runs: Mapping[str, Sequence[MetricRow]]) -> go.Figure:
    """Loss over steps, one line a run, from rows of `metrics.jsonl`."""
    return _metric_figure(runs, "loss", "loss per label token", "%{y:.5f}")


def tokens_per_s_figure(runs: Mapping[str, Sequence[MetricRow]]) -> go.Figure:
    """Real tokens a second over steps, one line a run; padding does not count. The axis starts at zero."""
    figure = _metric_figure(runs, "tokens_per_s", "real tokens per second", "%{y:.4~s}")
    figure.update_yaxes(rangemode="tozero", tickformat="~s")
    return figure


def step_time_figure(rows: Sequence[MetricRow]) -> go.Figure:
    """Predicted and measured seconds of every step of one run. The axis starts at zero."""
    rows = latest_per_step(rows)
    figure = go.Figure()
    for key, name, color, dash in (
        ("predicted_step_time_s", "predicted", PREDICTED, "dash"),
        ("step_time_s", "measured", MEASURED, "solid"),
    ):
        values = metric_column(rows, key)
        if not np.isnan(values).all():
            template = f"{name} %{{y:.4~s}}s<extra></extra>"
            figure.add_trace(_line(metric_column(rows, "step"), values, name, color, dash, template))
    _dress_curve(figure, "step", "step time")
    figure.update_yaxes(rangemode="tozero", tickformat="~s", ticksuffix="s")
    return figure


def pack_time_figure(sections: Mapping[str, Mapping[str, Timeline]]) -> go.Figure:
    """Spread of pack times: forward over backward, one box a strategy and origin.

    The number beside a box is its slowest pack over its mean pack; 1.000 is perfectly even. A pack counts
    with its slowest stage (see `pack_times`).

    Args:
        sections: by strategy, the timelines by origin ("predicted", "measured").
    """
    names = list(sections)
    origins = [o for o in ("predicted", "measured") if any(o in timelines for timelines in sections.values())]
    panel_px = max(1, len(names)) * (16 + 30 * len(origins))
    height = 68 + 50 + 40 + 2 * panel_px
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=40 / (40 + 2 * panel_px))
    slowest = 0.0
    for panel, direction in enumerate(_DIRECTIONS, start=1):
        for slot, origin in enumerate(origins):
            for row, name in enumerate(names):
                if origin not in sections[name]:
                    continue
                times = pack_times(sections[name][origin], direction)
                slowest = max(slowest, float(times.seconds.max(initial=0)))
                # Side by side by hand: boxes on a numeric axis keep their place when others are missing.
                center = row + (slot - (len(origins) - 1) / 2) * 0.4
                figure.add_trace(_box(times, center, origin), row=panel, col=1)
                figure.add_annotation(_box_note(times, center, panel))
        figure.add_annotation(_panel_heading(f"<b>{direction.capitalize()} packs</b>   number: max/mean", panel))
    for origin in origins:
        figure.add_trace(_legend_box(origin), row=1, col=1)
    longest = max(len(name) for name in names)
    figure.update_layout(
        height=height,
        margin={"l": min(220, 24 + 8 * longest), "r": 16, "t": 68, "b": 50},
        hovermode="closest",
    )
    figure.update_yaxes(
        tickvals=list(range(len(names))),
        ticktext=[escape(name, quote=False) for name in names],
        range=[len(names) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
        fixedrange=True,
    )
    # Room on the right for the numbers.
    figure.update_xaxes(tickformat="~s", ticksuffix="s", zeroline=False, range=[0, slowest * 1.15 or 1])
    figure.update_xaxes(title_text="time of a pack, slowest stage", row=2, col=1)
    return figure


def memory_figure(timelines: Mapping[str, Timeline], limit_bytes: int | None = None) -> go.Figure:
    """Bytes held over a step in GiB, one panel a timeline, one line a pipeline rank, the limit dashed.

    Replicas share the line of their pipeline rank (breaks between them); tooltips name the replica.

    Raises:
        DataError: no timeline has memory samples.
    """
    timelines = {name: timeline for name, timeline in timelines.items() if len(timeline.memory_bytes)}
    if not timelines:
        raise DataError("no timeline has memory samples; trace memory, or leave this figure out")
    figure = make_subplots(rows=len(timelines), cols=1, shared_xaxes=True, vertical_spacing=0.14)
    ranks = np.unique(np.concatenate([timeline.memory_rank for timeline in timelines.values()])).tolist()
    for panel, (name, timeline) in enumerate(timelines.items(), start=1):
        for position, rank in enumerate(ranks):
            trace = _memory_trace(timeline, rank, rank_color(position / max(1, len(ranks) - 1)))
            trace.showlegend = panel == 1
            figure.add_trace(trace, row=panel, col=1)
        if limit_bytes is not None:
            figure.add_trace(_limit_trace(timeline, limit_bytes, show_legend=panel == 1), row=panel, col=1)
        heading = f"<b>{escape(name, quote=False).capitalize()}</b>   peak {format_bytes(timeline.peak_bytes())}"
        figure.add_annotation(_panel_heading(heading, panel))
    figure.update_layout(
        height=126 + 210 * len(timelines),
        margin={"l": 64, "r": 16, "t": 68, "b": 50},
        hovermode="closest",
    )
    figure.update_yaxes(title_text="GiB", rangemode="tozero", zeroline=False)
    figure.update_xaxes(tickformat="~s", ticksuffix="s", zeroline=False, showticklabels=True)
    figure.update_xaxes(title_text="time since the step began", row=len(timelines), col=1)
    return figure


def metric_column(rows: Iterable[MetricRow], key: str) -> NDArray[np.float64]:
    """One key of metrics rows as float64[num_rows]; `None` becomes NaN, a gap in a line."""
    return np.array([np.nan if row[key] is None else float(row[key] or 0) for row in rows], dtype=np.float64)


def _metric_figure(runs: Mapping[str, Sequence[MetricRow]], key: str, y_title: str, y_format: str) -> go.Figure:
    figure = go.Figure()
    for index, (name, rows) in enumerate(runs.items()):
        rows = latest_per_step(rows)
        color, dash = series_style(index)
        name = escape(name, quote=False)
        template = f"{y_format}<extra>%{{fullData.name}}</extra>" if len(runs) > 1 else f"{y_format}<extra></extra>"
        figure.add_trace(_line(metric_column(rows, "step"), metric_column(rows, key), name, color, dash, template))
    _dress_curve(figure, "step", y_title)
    figure.update_layout(showlegend=len(runs) > 1)
    return figure


def _line(
    x: NDArray[np.float64], y: NDArray[np.float64], name: str, color: str, dash: str, template: str
) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        mode="lines+markers" if len(x) <= _MAX_STEPS_WITH_MARKERS else "lines",
        line={"color": color, "dash": dash, "width": 2},
        marker={"size": 5},
        hovertemplate=template,
    )


def _dress_curve(figure: go.Figure, x_title: str, y_title: str) -> None:
    figure.update_layout(height=_CURVE_PX, margin={"l": 70, "r": 16, "t": 40, "b": 50}, hovermode="x unified")
    figure.update_xaxes(
        title_text=x_title,
        zeroline=False,
        showgrid=False,
        showspikes=False,
        unifiedhovertitle={"text": f"{x_title} %{{x}}"},
    )
    figure.update_yaxes(title_text=y_title, zeroline=False)


def _box(times: PackTimes, center: float, origin: str) -> go.Box:
    color = MEASURED if origin == "measured" else PREDICTED
    return go.Box(
        x=times.seconds,
        y=np.full(len(times.seconds), center),
        orientation="h",
        width=0.3,
        boxpoints="outliers" if len(times.seconds) > 64 else "all",
        jitter=0.5,
        pointpos=0,
        boxmean=True,
        marker={"size": 4, "color": color, "opacity": 0.75},
        line={"color": color, "width": 1.5},
        fillcolor=f"{color}33" if origin == "measured" else "rgba(0,0,0,0)",
        customdata=np.column_stack([times.dp_rank, times.pack]),
        hovertemplate=f"{origin}, pack %{{customdata[1]}} of dp %{{customdata[0]}}: %{{x:.4~s}}s<extra></extra>",
        hoveron="points",
        legendgroup=origin,
        showlegend=False,
    )


def _legend_box(origin: str) -> go.Scatter:
    """A legend entry of its own: one for each origin, however many boxes there are."""
    hollow = origin != "measured"
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={
            "symbol": "square-open" if hollow else "square",
            "size": 11,
            "color": PREDICTED if hollow else MEASURED,
        },
        name=origin,
        legendgroup=origin,
    )


def _box_note(times: PackTimes, center: float, panel: int) -> go.layout.Annotation:
    return go.layout.Annotation(
        text=format_ratio(times.imbalance()),
        x=float(times.seconds.max(initial=0)),
        y=center,
        xref=f"x{_axis(panel)}",
        yref=f"y{_axis(panel)}",
        xanchor="left",
        xshift=6,
        showarrow=False,
        font={"size": 11.5},
    )


def _panel_heading(text: str, panel: int) -> go.layout.Annotation:
    """Heading over the left edge of a panel; `text` is plotly markup."""
    return go.layout.Annotation(
        text=text,
        xref="paper",
        yref=f"y{_axis(panel)} domain",
        x=0,
        y=1,
        xanchor="left",
        yanchor="bottom",
        yshift=4,
        showarrow=False,
        font={"size": 13},
    )


def _axis(panel: int) -> str:
    return "" if panel == 1 else str(panel)


def _memory_trace(timeline: Timeline, rank: int, color: str) -> go.Scatter:
    time_s, gib, dp_rank = [], [], []
    for replica in np.unique(timeline.memory_dp_rank[timeline.memory_rank == rank]).tolist():
        chosen = (timeline.memory_rank == rank) & (timeline.memory_dp_rank == replica)
        last = timeline.memory_bytes[chosen][-1:] / _GIB
        # Held until the step ends, then a break before the next replica's line.
        time_s += [timeline.memory_time_s[chosen], [timeline.step_time_s, np.nan]]
        gib += [timeline.memory_bytes[chosen] / _GIB, last, [np.nan]]
        dp_rank.append(np.full(int(chosen.sum()) + 2, replica))
    nothing = np.zeros(0)
    return go.Scatter(
        x=np.concatenate([nothing, *time_s]),
        y=np.concatenate([nothing, *gib]),
        customdata=np.concatenate([nothing, *dp_rank]),
        mode="lines",
        line={"color": color, "width": 1.6, "shape": "hv"},
        name=f"rank {rank}",
        legendgroup=f"rank {rank}",
        hovertemplate=f"rank {rank}, dp %{{customdata}}: %{{y:.2f}} GiB at %{{x:.4~s}}s<extra></extra>",
    )


def _limit_trace(timeline: Timeline, limit_bytes: int, show_legend: bool) -> go.Scatter:
    return go.Scatter(
        x=[0.0, timeline.step_time_s],
        y=[limit_bytes / _GIB] * 2,
        mode="lines",
        line={"color": LIMIT, "width": 2, "dash": "dash"},
        name=f"limit {format_bytes(limit_bytes)}",
        legendgroup="limit",
        showlegend=show_legend,
        hovertemplate=f"limit {format_bytes(limit_bytes)}<extra></extra>",
    )
