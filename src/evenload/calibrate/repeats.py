"""Repeats of one timing: their median, and which of them lie far from it.

A median, because a step in training has the average luck of a machine, not its best: the fastest of thirty repeats is
what no step takes. Repeats that lie far off (another program, a clock that changed) hardly move a median; they are
counted and told.
"""

import statistics
from collections.abc import Callable, Sequence

import torch

from evenload.runtime.device import seconds_now

_FAR_DEVIATIONS = 5.0
# A median absolute deviation of a normal distribution is this share of its standard deviation.
_NORMAL = 0.6745
# Clocks and interrupts: differences below this share of the median are never far.
_LEAST_FAR_SHARE = 0.05


def num_outliers(seconds: Sequence[float]) -> int:
    """Repeats more than five robust standard deviations (median absolute deviation) from the median."""
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(one - middle) for one in seconds) / _NORMAL
    far_s = max(_FAR_DEVIATIONS * deviation, _LEAST_FAR_SHARE * middle)
    return sum(abs(one - middle) > far_s for one in seconds)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median of some runs, after one that does not count."""
    work()
    return statistics.median(timed(work, device) for _ in range(repeats))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, with everything that it queues."""
    start_s = seconds_now(device)
    work()
    return seconds_now(device) - start_s
