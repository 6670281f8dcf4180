"""The figures that stand for a whole trained run: one rule for every table, tile and label of a report.

The first step warms up caches, allocators and connections, so it is left out of medians wherever there is another.
Memory and loss are not medians: the largest of all steps, and the last one.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.report.metrics_file import MetricRow, latest_per_step
from evenload.report.run_report import RunSection


def typical(rows: Iterable[MetricRow], key: str) -> float | None:
    """Median of a key over the steps after the first, or of the only one; None where no step has a value."""
    rows = latest_per_step(rows)
    values = metric_column(rows[1:] or rows, key)
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else None


def typical_meaning(rows: Iterable[MetricRow]) -> str:
    """What `typical` is, in words that stand beside it."""
    count = len(latest_per_step(rows))
    if count <= 2:
        return "only step" if count == 1 else "second of 2 steps"
    return f"median of the {count - 1} steps after the first"


def largest(rows: Iterable[MetricRow], key: str) -> float | None:
    values = metric_column(latest_per_step(rows), key)
    values = values[~np.isnan(values)]
    return float(values.max()) if len(values) else None


def metric_column(rows: Iterable[MetricRow], key: str) -> NDArray[np.float64]:
    """One key of metrics rows as float64[num_rows]; `None` becomes NaN, a gap in a line."""
    return np.array([np.nan if row[key] is None else float(row[key] or 0) for row in rows], dtype=np.float64)


def comparison_row(section: RunSection) -> dict[str, Any]:
    """A trained run as a row of the comparison (`report.columns`)."""
    rows = latest_per_step(section.metrics)
    return {
        "name": section.name,
        "feasible": True,
        "measured_step_time_s": typical(rows, "step_time_s"),
        "mean_step_time_s": typical(rows, "predicted_step_time_s"),
        "measured_tokens_per_s": typical(rows, "tokens_per_s"),
        "bubble_fraction": typical(rows, "bubble_fraction"),
        "imbalance_forward": typical(rows, "imbalance_forward"),
        "imbalance_backward": typical(rows, "imbalance_backward"),
        "peak_memory_bytes": largest(rows, "peak_memory_bytes"),
        "final_loss": rows[-1]["loss"],
        "layout": rows[-1]["layout"],
    }
