"""What a measured comparison found, in one sentence: the best strategy, and its speed against `best_fit` as it was run.

Plans are compared with `best_fit` in the windows that suit it best (`explore.headline`); a run has only its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from evenload.report.columns import is_feasible
from evenload.report.units import format_seconds

BASELINE = "best_fit"


def measured_headline(rows: Sequence[Mapping[str, Any]], best: str) -> str:
    """Of rows with `measured_step_time_s`, without a full stop; "" where none is best or nothing was measured."""
    measured_s = {str(row["name"]): row.get("measured_step_time_s") for row in rows if is_feasible(row)}
    best_s, other_s = measured_s.get(best), measured_s.get(BASELINE)
    if best_s is None:
        return ""
    if best == BASELINE or other_s is None:
        return f"{best} takes {format_seconds(best_s)} a step, measured"
    return (
        f"{best} is {other_s / best_s:.2f}× as fast as {BASELINE} in the windows that it was run with: "
        f"{format_seconds(best_s)} instead of {format_seconds(other_s)} a step, measured"
    )
