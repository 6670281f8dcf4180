"""Curves of trained runs over their steps: loss, speed, step time.

Numbers are drawn as they are: no smoothing. Beyond some thousand steps a line keeps, of the steps that share a pixel,
the least and the most, which looks the same. Predicted is dashed and grey; measured is solid.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.report.axes import Scale, Tick, round_ticks, step_ticks, tick_labels
from evenload.report.figure import Axes, Curves, Figure, legend, panel
from evenload.report.metrics_file import MetricRow, latest_per_step
from evenload.report.palette import MEASURED, PREDICTED, series_style
from evenload.report.run_figures import metric_column
from evenload.report.svg_marks import dot, line
from evenload.types.validation import Validation

# From this many steps on markers hide the line.
_MAX_STEPS_WITH_MARKERS = 80
_MOST_POINTS = 4_000
Series = tuple[str, str, str, NDArray[np.float64], NDArray[np.float64]]
"""Name, colour, dash, steps, values (NaN where not known)."""


def loss_figure(
    runs: Mapping[str, Sequence[MetricRow]], validations: Mapping[str, Sequence[Validation]] | None = None
) -> Figure:
    """Loss over steps, one line a run, from rows of `metrics.jsonl`; dashed that of validation data, where there is."""
    series = _of_runs(runs, "loss")
    for index, (name, found) in enumerate((validations or {}).items()):
        color, _ = series_style(index)
        for of_average, dash in ((False, "dash"), (True, "dot")):
            passes = [one for one in found if one.of_average is of_average]
            steps = np.array([one.step for one in passes], np.float64)
            losses = np.array([np.nan if one.loss is None else one.loss for one in passes])
            label = f"{name}, validation{' of averaged weights' if of_average else ''}"
            if passes:
                series.append((label, color, dash, steps, losses))
    return _curves(series, "loss per label token", "")


def tokens_per_s_figure(runs: Mapping[str, Sequence[MetricRow]]) -> Figure:
    """Real tokens a second over steps, one line a run; padding does not count. The axis starts at zero."""
    return _curves(_of_runs(runs, "tokens_per_s"), "real tokens per second", "count", from_zero=True)


def step_time_figure(rows: Sequence[MetricRow], run: str | None = None) -> Figure:
    """Predicted and measured seconds of every step of one run. The axis starts at zero.

    Args:
        run: its name, so that the page's step view opens this run's steps.
    """
    rows = latest_per_step(rows)
    series = [
        (name, color, dash, metric_column(rows, "step"), metric_column(rows, key))
        for key, name, color, dash in (
            ("predicted_step_time_s", "predicted", PREDICTED, "dash"),
            ("step_time_s", "measured", MEASURED, "solid"),
        )
    ]
    known = [one for one in series if not np.isnan(one[-1]).all()]
    return _curves(known, "step time", "s", from_zero=True, run=run)


def _of_runs(runs: Mapping[str, Sequence[MetricRow]], key: str) -> list[Series]:
    found = []
    for index, (name, rows) in enumerate(runs.items()):
        rows = latest_per_step(rows)
        found.append((name, *series_style(index), metric_column(rows, "step"), metric_column(rows, key)))
    return found


def _curves(
    series: Sequence[Series], y_title: str, kind: str, *, from_zero: bool = False, run: str | None = None
) -> Figure:
    axes = _axes(series, y_title, kind, from_zero)
    marks = []
    for _, color, dash, steps, values in series:
        kept = outline(values)
        points = [(axes.x.share(x), _y_px(axes, y)) for x, y in zip(steps[kept], values[kept], strict=True)]
        marks.append(line(points, axes.height_px, color, dash))
        if len(steps) <= _MAX_STEPS_WITH_MARKERS:
            marks += [dot(x, y, color, radius_px=2.6) for x, y in points if y is not None]
    label = f"{y_title} over {_count(series)} steps of {', '.join(one[0] for one in series) or 'no run'}"
    names = legend((name, color, dash) for name, color, dash, _, _ in series) if len(series) > 1 else ""
    return Figure(body=names + panel(axes, marks, label, _pointed(series, kind, run)), label=label)


def _count(series: Sequence[Series]) -> int:
    return max((len(one[3]) for one in series), default=0)


def _pointed(series: Sequence[Series], kind: str, run: str | None) -> Curves | None:
    """All runs at the steps of any of them; `run` where all series are of one."""
    if not series:
        return None
    steps = np.unique(np.concatenate([one[3] for one in series]))
    values = []
    for name, color, _, at, column in series:
        whole = np.full(len(steps), np.nan)
        whole[np.searchsorted(steps, at)] = column
        values.append((name, color, whole.tolist()))
    return Curves("step", steps.tolist(), kind, values, {} if run is None else {"run": run})


def _axes(series: Sequence[Series], y_title: str, kind: str, from_zero: bool) -> Axes:
    steps = np.concatenate([one[3] for one in series]) if series else np.zeros(0)
    values = np.concatenate([one[4] for one in series]) if series else np.zeros(0)
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if from_zero:
        low = min(0.0, low)
    room = 0.06 * (high - low or abs(high) or 1.0)
    y = Scale(low if from_zero else low - room, high + room)
    first, last = (int(steps.min()), int(steps.max())) if len(steps) else (0, 1)
    room = 0.5 if first == last else 0.012 * (last - first)
    at = round_ticks(y.low, y.high)
    return Axes(
        x=Scale(first - room, last + room),
        y=y,
        x_ticks=step_ticks(first, last),
        y_ticks=[Tick(value, label) for value, label in zip(at, tick_labels(at, kind), strict=True)],
        x_title="step",
        y_title=y_title,
    )


def _y_px(axes: Axes, value: float) -> float | None:
    return axes.y_px(value) if np.isfinite(value) else None


def outline(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the values to draw: all; of very many the first, least, most and last of every group of neighbours."""
    if len(values) <= _MOST_POINTS:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), _MOST_POINTS // 4 + 1).astype(np.int64)
    kept = {0, len(values) - 1}
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = values[start:stop]
        kept |= {start, stop - 1}
        unknown = np.flatnonzero(~np.isfinite(part))
        kept |= {start + int(i) for i in unknown[:1]}
        if len(unknown) < len(part):
            kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
    return np.array(sorted(kept))
