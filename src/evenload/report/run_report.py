"""Hold everything a report page shows (`RunReport`), and make the figures of a trained run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evenload.report.figures import (
    largest,
    loss_figure,
    metric_column,
    step_time_figure,
    tokens_per_s_figure,
    typical,
    typical_meaning,
)
from evenload.report.page import definitions_html, figure_html
from evenload.report.run_files import MetricRow, latest_per_step, predicted_part_seconds
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
from evenload.types.timeline import Timeline, TimeSplit


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
