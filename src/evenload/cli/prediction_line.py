"""What a run says where its steps consistently take another time than predicted.

Costs that were measured beside other work, or on a machine that has become busy since, are off for every step alike;
the planner then still compares plans by them, but step times and what is worth its overhead are wrong.
"""

from collections.abc import Sequence
from statistics import median

NUM_STEPS = 3
"""Steps after the first, which pays for what is done once, that are looked at."""

_FACTOR = 1.2
"""All of them beyond it, on the same side, are no accident."""


def prediction_line(ratios: Sequence[float], device: str, cost_file: str | None) -> str:
    """A sentence, or "" where predictions hold or it is not time to tell.

    `ratios` are measured over predicted seconds of the steps after the first, `device` is where costs were measured.
    """
    if len(ratios) != NUM_STEPS:
        return ""
    is_slower, is_faster = min(ratios) > _FACTOR, max(ratios) < 1 / _FACTOR
    if not (is_slower or is_faster):
        return ""
    reason = (
        f"the machine is busier or slower now than when costs were measured ({device})"
        if is_slower
        else f"the machine was busier when costs were measured ({device}), or was a slower one"
    )
    times = f"steps take {median(ratios):.2f} times their predicted time"
    advice = "train.recalibrate=true measures them anew"
    if cost_file is not None:
        advice = f"leave out train.cost_file {cost_file} to have them measured here"
    return f"{times}: {reason}; {advice}"
