"""The figures that stand for a whole trained run: one rule for every table, tile and label of a report.

The first step warms up caches, allocators and connections, so it is left out of medians wherever there is another.
Memory and loss are not medians: the largest of all steps, and the last one.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from evenload.report.metrics_file import MetricRow, latest_per_step


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
