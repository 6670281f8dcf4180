"""Intervals of measured over predicted step times that hold for cases which were not measured yet.

CV+ (Barber, Candès, Ramdas and Tibshirani, "Predictive inference with the jackknife+", Annals of Statistics 49, 2021,
section 3) with a fold a case: rows of one case share a model, a cost file and a machine's mood, so a row is judged by
the other cases only.

    m(-c)      the median of ln(measured / predicted) over all rows but those of case c
    R(i)       |ln ratio of row i - m(-c(i))|
    interval   from the floor(0.1 (n + 1))-th smallest of m - R to the ceil(0.9 (n + 1))-th smallest of m + R

The ranks with n + 1 are the correction for few rows; with fewer than nine there is no interval. The theorem promises
80 % whatever the distribution and rows of equal cases come out at about 90 %; how many left-out cases really lie inside
is tested on the ledger.
"""

from collections.abc import Mapping, Sequence
from math import ceil, floor

import numpy as np

MIN_CASES = 3
"""Fewer say nothing about another case."""


def case_interval(ratios: Mapping[str, Sequence[float]], miss: float = 0.1) -> tuple[float, float] | None:
    """Factors between which the ratio of a row of another case lies with probability 1 - `miss`.

    Args:
        ratios: measured / predicted of the rows of every case, above 0.

    Returns:
        None where there are too few cases or rows.
    """
    logs = {case: np.log(np.asarray(values, np.float64)) for case, values in ratios.items() if len(values)}
    count = sum(map(len, logs.values()))
    low_rank, high_rank = floor(miss * (count + 1)), ceil((1 - miss) * (count + 1))
    if len(logs) < MIN_CASES or low_rank < 1 or high_rank > count:
        return None
    low, high = [], []
    for case, values in logs.items():
        middle = np.median(np.concatenate([other for name, other in logs.items() if name != case]))
        sizes = np.abs(values - middle)
        low.append(middle - sizes)
        high.append(middle + sizes)
    return (
        float(np.exp(np.sort(np.concatenate(low))[low_rank - 1])),
        float(np.exp(np.sort(np.concatenate(high))[high_rank - 1])),
    )


def left_out_coverage(
    ratios: Mapping[str, Sequence[float]], among: Mapping[str, Sequence[float]] | None = None
) -> tuple[int, int]:
    """(rows inside, rows): every case against the interval that the others alone give, those of `among` where it is
    given; (0, 0) where they give none."""
    inside = total = 0
    for case, values in ratios.items():
        found = case_interval({name: others for name, others in (among or ratios).items() if name != case})
        if found is not None:
            total += len(values)
            inside += sum(found[0] <= value <= found[1] for value in values)
    return inside, total
