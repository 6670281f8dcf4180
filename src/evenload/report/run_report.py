"""Hold everything a report page shows (`RunReport`), and draw its pictures: curves of runs, the parts of a step's time.

Nothing is smoothed; of many steps a line keeps extremes (`outline`). Predicted is dashed and grey; measured is solid.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.report import svg
from evenload.report.page import definitions_html, figure_html
from evenload.report.run_files import MetricRow, latest_per_step, predicted_part_seconds
from evenload.report.svg import MEASURED, PREDICTED, SERIES, Axes, Curves, Figure, NumberTable, Scale
from evenload.types.plan import StepPlan
from evenload.types.run import LayoutDecision, LengthProfile, Validation
from evenload.types.text import (
    LengthUnit,
    format_bytes,
    format_change,
    format_count,
    format_percent,
    format_plain,
    format_seconds,
)
from evenload.types.timeline import CAUSE_GROUPS, CAUSE_LABELS, Timeline, TimeSplit


@dataclass(frozen=True, kw_only=True, eq=False)
class StepView:
    """One step with at least one timeline; without a plan the page cannot show what packs hold."""

    step: int
    predicted: Timeline | None = None
    measured: Timeline | None = None
    plan: StepPlan | None = None

    def timelines(self) -> dict[str, Timeline]:
        """Return the timelines by origin, predicted before measured."""
        both = {"predicted": self.predicted, "measured": self.measured}
        return {origin: timeline for origin, timeline in both.items() if timeline is not None}


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSection:
    """One run, or one strategy that was only simulated.

    Args:
        name: heading and legend entry; unique in a report.
        metrics: rows of `metrics.jsonl`, in file order; empty when nothing was trained.
        steps: those with details, ascending.
        time_split: where the predicted time goes, mean over the steps.
        memory_limit_bytes: drawn as a line.
        notes: sentences shown with the name.
        validations: losses of the validation data, ascending.
        layout_decisions: about every step; () where the layout cannot change.
    """

    name: str
    metrics: tuple[MetricRow, ...] = ()
    steps: tuple[StepView, ...] = ()
    time_split: TimeSplit | None = None
    memory_limit_bytes: int | None = None
    notes: tuple[str, ...] = ()
    validations: tuple[Validation, ...] = ()
    layout_decisions: tuple[LayoutDecision, ...] = ()

    def timelines(self) -> dict[str, tuple[Timeline, ...]]:
        """Return the timelines of all steps by origin, predicted before measured."""
        steps = [view.timelines() for view in self.steps]
        by_origin = {
            origin: tuple(one[origin] for one in steps if origin in one) for origin in ("predicted", "measured")
        }
        return {origin: timelines for origin, timelines in by_origin.items() if timelines}


@dataclass(frozen=True, kw_only=True, eq=False)
class RunReport:
    """A whole page.

    Args:
        headline: the result in a few sentences; "" = none.
        cards: (name, value, remark) of the figures that matter most; summary: what they are of.
        next_step: the setting or command that follows; "" = none.
        facts: (name, value) pairs: hardware, model, data, layout, strategy, seed, versions.
        sections: one for each strategy or configuration.
        comparison: a row of each strategy, with keys of `evenload plan --json` and `evenload bench`.
        best: names of the rows to mark.
        ledger: what became of all tokens.
        lengths: of the documents of all steps.
    """

    title: str
    headline: str = ""
    cards: tuple[tuple[str, str, str], ...] = ()
    summary: str = ""
    next_step: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    sections: tuple[RunSection, ...] = ()
    comparison: tuple[Mapping[str, object], ...] = ()
    best: tuple[str, ...] = ()
    ledger: tuple[str, ...] = ()
    lengths: LengthProfile | None = None
    unit: LengthUnit = "tokens"


_READ_STEP_TIME = (
    "Solid is what the steps took, dashed what the simulator said beforehand. A constant gap is a cost model off "
    "by a factor (calibrate again); spikes of the solid line alone are waits outside of the plan."
)
_READ_CLICK = " A click (or Enter) shows the inside of a step."
_READ_TOKENS = "Real tokens trained in a second over all devices. Padding does not count, so runs compare fairly."
_READ_LOSS = (
    "Cross entropy over the label tokens of the whole global batch. Packing rearranges only inside of a step, so "
    "runs on the same data and seed must lie on one line (only <code>wlb</code> moves documents between steps). Dashed "
    "is the loss of validation data, where there are some."
)


def curves_html(identifier: str, run: RunSection) -> list[str]:
    """Return figures of predicted and measured step time, of loss and speed, and what is missing."""
    read = _READ_STEP_TIME + (_READ_CLICK if run.steps else "") + _prediction_error(run.metrics)
    loss, speed = loss_figure(run.name, run.metrics, run.validations), tokens_per_s_figure(run.name, run.metrics)
    time = step_time_figure(run.metrics)
    blocks = [
        figure_html(f"{identifier}-time", "Step time, predicted and measured", read, time),
        figure_html(f"{identifier}-loss", "Loss, measured", _READ_LOSS, loss),
        figure_html(f"{identifier}-speed", "Tokens per second, measured", _READ_TOKENS, speed),
    ]
    timelines = run.timelines()
    missing = [f"{origin} timeline" for origin in ("predicted", "measured") if origin not in timelines]
    for origin, steps in timelines.items():
        if not any(len(timeline.memory_bytes) for timeline in steps):
            missing.append(f"{origin} memory over time")
    return [*blocks, f"<p>Not in this report: {', '.join(missing)}.</p>"] if missing else blocks


def tiles_html(section: RunSection) -> str:
    rows = latest_per_step(section.metrics)
    measured, predicted = typical(rows, "step_time_s"), typical(rows, "predicted_step_time_s")
    part_s = predicted_part_seconds({"step_time_s": measured, "exchange_s": typical(rows, "exchange_s")})
    off = format_change(part_s / predicted - 1 if part_s is not None and predicted else None)
    meaning = typical_meaning(rows)
    peak, predicted_peak = largest(rows, "peak_memory_bytes"), largest(rows, "predicted_peak_memory_bytes")
    tiles = (
        ("steps", f"{len(rows):,}", ""),
        ("loss, last step", format_plain(rows[-1]["loss"], ".4f"), f"first {format_plain(rows[0]['loss'], '.4f')}"),
        ("step time, measured", format_seconds(measured), f"{meaning}; predicted {format_seconds(predicted)}, {off}"),
        ("tokens/s, measured", format_count(typical(rows, "tokens_per_s")), f"{meaning}; real tokens"),
        ("bubble, measured", format_percent(typical(rows, "bubble_fraction")), meaning),
        ("memory, peak of all steps", format_bytes(peak), f"predicted {format_bytes(predicted_peak)}"),
        ("data wait", format_seconds(typical(rows, "data_wait_s")), meaning),
    )
    return cards_html(tiles)


def cards_html(cards: Iterable[tuple[str, str, str]]) -> str:
    """Return figures in boxes: (name, value, remark)."""
    shown = ((name, f"{value}<small>{small}</small>" if small else value) for name, value, small in cards)
    return definitions_html("tiles", shown)


def _prediction_error(rows: Sequence[MetricRow]) -> str:
    rows = latest_per_step(rows)
    measured = np.array([predicted_part_seconds(row) for row in rows], float)
    predicted = metric_column(rows, "predicted_step_time_s")
    known = np.isfinite(measured) & np.isfinite(predicted) & (measured > 0)
    if not known.any():
        return " No step has both numbers."
    error = float(np.abs(predicted[known] / measured[known] - 1).mean())
    return f" Mean absolute error of the prediction over {int(known.sum()):,} steps: <b>{format_percent(error)}</b>."


# From this many steps on markers hide the line.
_MAX_STEPS_WITH_MARKERS = 80
_MOST_POINTS = 4_000
Series = tuple[str, str, str, NDArray[np.float64], NDArray[np.float64]]
"""Name, colour, dash, steps, values (NaN where not known)."""


def loss_figure(name: str, rows: Sequence[MetricRow], validations: Sequence[Validation] = ()) -> Figure:
    """Draw the loss of a run over steps, and dashed that of validation data."""
    series = [_of_run(name, rows, "loss")]
    for of_average, kind, dash in ((False, "validation", "dash"), (True, "validation of averaged weights", "dot")):
        passes = [one for one in validations if one.of_average is of_average]
        steps, losses = (np.array([getattr(one, key) for one in passes], float) for key in ("step", "loss"))
        if passes:
            series.append((f"{name}, {kind}", SERIES[0], dash, steps, losses))
    return _curves(series, "loss per label token", "")


def tokens_per_s_figure(name: str, rows: Sequence[MetricRow]) -> Figure:
    """Draw real tokens a second of a run over steps; padding does not count."""
    return _curves([_of_run(name, rows, "tokens_per_s")], "real tokens per second", "count", from_zero=True)


def step_time_figure(rows: Sequence[MetricRow]) -> Figure:
    """Draw predicted and measured seconds of every step of a run."""
    rows = latest_per_step(rows)
    predicted, measured = (metric_column(rows, key) for key in ("predicted_step_time_s", "step_time_s"))
    steps = metric_column(rows, "step")
    both = ("predicted", PREDICTED, "dash", steps, predicted), ("measured", MEASURED, "solid", steps, measured)
    series = [one for one in both if not np.isnan(one[-1]).all()]
    return _curves(series, "step time", "s", from_zero=True)


def _of_run(name: str, rows: Sequence[MetricRow], key: str) -> Series:
    rows = latest_per_step(rows)
    return name, SERIES[0], "solid", metric_column(rows, "step"), metric_column(rows, key)


def _curves(series: Sequence[Series], y_title: str, kind: str, *, from_zero: bool = False) -> Figure:
    count = max((len(one[3]) for one in series), default=0)
    label = f"{y_title} over {count} steps of {', '.join(one[0] for one in series) or 'no run'}"
    names = svg.legend((name, color, dash) for name, color, dash, _, _ in series) if len(series) > 1 else ""
    panel = _curve_panel(_axes(series, y_title, kind, from_zero=from_zero), series, label, kind)
    return Figure(body=names + panel)


def _curve_panel(axes: Axes, series: Sequence[Series], label: str, kind: str) -> str:
    """Draw lines with markers; pointing shows all series at the steps of any."""
    if not series:
        return svg.panel(axes, [], label)
    steps = np.unique(np.concatenate([one[3] for one in series]))
    marks, pointed = [], []
    for name, color, dash, at, values in series:
        kept = ((axes.x.share(at[i]), values[i]) for i in outline(values))
        points = [(x, axes.y_px(y) if np.isfinite(y) else None) for x, y in kept]
        marks.append(svg.line(points, axes.height_px, color, dash))
        if len(at) <= _MAX_STEPS_WITH_MARKERS:
            marks += [svg.dot(x, y, color) for x, y in points if y is not None]
        whole = np.full(len(steps), np.nan)
        whole[np.searchsorted(steps, at)] = values
        pointed.append((name, color, whole.tolist()))
    return svg.panel(axes, marks, label, Curves("step", steps.tolist(), kind, pointed))


def _axes(series: Sequence[Series], y_title: str, kind: str, *, from_zero: bool) -> Axes:
    steps = np.concatenate([one[3] for one in series]) if series else np.zeros(0)
    values = np.concatenate([one[4] for one in series]) if series else np.zeros(0)
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if from_zero:
        low = min(0.0, low)
    margin = 0.06 * (high - low or abs(high) or 1.0)
    y = Scale(low if from_zero else low - margin, high + margin)
    first, last = (int(steps.min()), int(steps.max())) if len(steps) else (0, 1)
    beside = 0.5 if first == last else 0.012 * (last - first)
    x = Scale(first - beside, last + beside)
    ticks = {"x_ticks": svg.step_ticks(first, last), "y_ticks": svg.value_ticks(y.low, y.high, kind)}
    return Axes(x=x, y=y, **ticks, x_title="step", y_title=y_title)


def outline(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the indices of values to draw: all, or the first, least, most and last of every group of neighbours."""
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


def typical(rows: Iterable[MetricRow], key: str) -> float | None:
    """Return the median of a key over the steps after the first, which warms up, or of the only one; None = unknown."""
    rows = latest_per_step(rows)
    values = metric_column(rows[1:] or rows, key)
    return None if np.isnan(values).all() else float(np.nanmedian(values))


def typical_meaning(rows: Iterable[MetricRow]) -> str:
    count = len(latest_per_step(rows))
    if count <= 2:
        return "only step" if count == 1 else "second of 2 steps"
    return f"median of the {count - 1} steps after the first"


def largest(rows: Iterable[MetricRow], key: str) -> float | None:
    values = metric_column(latest_per_step(rows), key)
    return None if np.isnan(values).all() else float(np.nanmax(values))


def metric_column(rows: Iterable[MetricRow], key: str) -> NDArray[np.float64]:
    """Return one key of metrics rows as float64[num_rows]; `None` becomes NaN, a gap in a line."""
    return np.array([np.nan if row[key] is None else float(row[key] or 0) for row in rows], dtype=np.float64)


_ROW_PX = 34
_BAR_PX = 24
_LEAST_NAMED_SHARE = 0.0005
"""Of the longest bar; thinner parts cannot be seen or pointed at."""
_LEAST_LABELLED_SHARE, _LEAST_ON_NARROW = 0.055, 0.14
"""Of the width, for a part that shows its share of the step."""


def time_split_figure(splits: Mapping[str, TimeSplit]) -> Figure:
    """Draw the predicted step of every strategy as a stacked bar of groups of causes; those that cost nothing anywhere
    are left out. The numbers are of every cause."""
    longest_s = max(split.total_s() for split in splits.values()) or 1.0
    least_s = _LEAST_NAMED_SHARE * longest_s
    fields = [field for field in CAUSE_LABELS if max(getattr(one, field) for one in splits.values()) >= least_s]
    groups = [group for group in CAUSE_GROUPS if max(one.groups()[group] for one in splits.values()) >= least_s]
    scale = Scale(0, longest_s * 1.01)
    shown = [(name, _bar(split, groups, scale), _time_split_note(split)) for name, split in splits.items()]
    label = "; ".join(f"{name}: {note}" for name, _, note in shown)
    ticks = [replace(tick, is_minor=bool(i % 2)) for i, tick in enumerate(svg.value_ticks(0, scale.high, "s"))]
    title = "predicted seconds of a step, mean over devices and steps"
    widths = {"names_px": min(220, 20 + 7 * max(map(len, splits))), "notes_px": 196}
    chart = svg.rows_chart(shown, _ROW_PX, label, x=scale, ticks=ticks, title=title, **widths)
    keys = svg.legend((group, svg.GROUP_COLORS[group], "fill") for group in groups)
    rows = []
    for field in fields:
        parts = [(getattr(split, field), split.total_s()) for split in splits.values()]
        cells = [f"{format_seconds(s)}, {format_percent(s / total)}" if s > 0 and total else "·" for s, total in parts]
        rows.append((CAUSE_LABELS[field], *cells))
    rows.append(("step", *(format_seconds(split.total_s()) for split in splits.values())))
    return Figure(body=keys + chart, numbers=NumberTable(("cause", *splits), tuple(rows)))


def _bar(split: TimeSplit, groups: list[str], scale: Scale) -> str:
    parts, before_s = [], 0.0
    for group in groups:
        if (seconds := split.groups()[group]) <= 0:
            continue
        span = scale.share(before_s), scale.share(before_s + seconds)
        share = format_percent(seconds / split.total_s())
        tip = f"{group}: {format_seconds(seconds)}, {share} of the step"
        parts.append(svg.rect(span, (_ROW_PX - _BAR_PX) / 2, _BAR_PX, svg.GROUP_COLORS[group], tip))
        if span[1] - span[0] >= _LEAST_LABELLED_SHARE:
            kind = "inside" if span[1] - span[0] >= _LEAST_ON_NARROW else "inside minor"
            place, color = (sum(span) / 2, _ROW_PX / 2 + 4), svg.text_on(svg.GROUP_COLORS[group])
            parts.append(svg.text(*place, share, kind=kind, color=color))
        before_s += seconds
    return "".join(parts)


def _time_split_note(split: TimeSplit) -> str:
    total_s = split.total_s()
    useful = format_percent(split.useful_s / total_s if total_s else None)
    return f"{format_seconds(total_s)} predicted, {useful} useful"
