"""How much the rounds of a step may differ before their median is not believed.

The more rounds, the further apart are the fastest and the slowest of them, and the better known is their median. So the
limit is on the median: on its standard error as the range of the rounds tells it, were they normal,

    range / expected_range(n) · sqrt(pi / 2) / sqrt(n)

with the expected range of n draws of a normal distribution in standard deviations (1.69 of three, 2.70 of seven).
"""

import functools
import math
from statistics import NormalDist

import numpy as np

_REFERENCE_ROUNDS = 3
QUIET_SPREAD = 0.15
"""(slowest - fastest) / median of so many rounds, at most."""


def most_spread(rounds: int) -> float:
    """(slowest - fastest) / median of some rounds whose median is as well known as that of three within
    `QUIET_SPREAD`: 0.37 of seven."""
    if rounds < 2:
        return QUIET_SPREAD  # one round differs from none
    of_reference = expected_range(_REFERENCE_ROUNDS) * math.sqrt(_REFERENCE_ROUNDS)
    return QUIET_SPREAD * expected_range(rounds) * math.sqrt(rounds) / of_reference


@functools.cache
def expected_range(draws: int) -> float:
    """Of so many draws of a normal distribution, slowest minus fastest in standard deviations: the integral of
    1 - P(all below x) - P(all above x) (Tippett 1925)."""
    x, step = np.linspace(-9.0, 9.0, 3601, retstep=True)
    below = np.array([NormalDist().cdf(one) for one in x.tolist()])
    return float((1 - below**draws - (1 - below) ** draws).sum() * step)
