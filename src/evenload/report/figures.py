"""Curves of trained runs over their steps: loss, speed, step time.

Every builder returns a plotly figure with transparent background and without fonts or grid colours of its
own, so that the page can dress it for light and dark. Numbers are drawn as they are: no smoothing, no
resampling. Predicted is dashed and grey; measured is solid. User texts are escaped, because plotly
reads a small HTML subset in names.
"""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from evenload.report.metrics_file import MetricRow, latest_per_step
from evenload.report.palette import MEASURED, PREDICTED, series_style
from evenload.report.run_figures import metric_column

_CURVE_PX = 300
# From this many steps on markers hide the line.
_MAX_STEPS_WITH_MARKERS = 80


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
    _dress_curve(figure, "step time")
    figure.update_yaxes(rangemode="tozero", tickformat="~s", ticksuffix="s")
    return figure


def _metric_figure(runs: Mapping[str, Sequence[MetricRow]], key: str, y_title: str, y_format: str) -> go.Figure:
    figure = go.Figure()
    for index, (name, rows) in enumerate(runs.items()):
        rows = latest_per_step(rows)
        color, dash = series_style(index)
        name = escape(name, quote=False)
        template = f"{y_format}<extra>%{{fullData.name}}</extra>" if len(runs) > 1 else f"{y_format}<extra></extra>"
        figure.add_trace(_line(metric_column(rows, "step"), metric_column(rows, key), name, color, dash, template))
    _dress_curve(figure, y_title)
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


def _dress_curve(figure: go.Figure, y_title: str) -> None:
    figure.update_layout(height=_CURVE_PX, margin={"l": 70, "r": 16, "t": 40, "b": 50}, hovermode="x unified")
    figure.update_xaxes(
        title_text="step",
        zeroline=False,
        showgrid=False,
        showspikes=False,
        unifiedhovertitle={"text": "step %{x}"},
    )
    figure.update_yaxes(title_text=y_title, zeroline=False)
