"""Fit coefficients to timed packs, and measure the error of the fit and the noise of the machine.

    minimise  Σ (prediction / measured - 1)²   over coefficients >= 0

so that a small pack counts like a large one. The error is of packs that the fit has not seen (k-fold cross-validation;
all timings of a pack are in one fold). Of repeats the median counts. A neighbour that is always busy slows the fastest
repeat too; Linux counts how long threads were ready without a core (`cost.coefficients.Noise`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls

from evenload.cost.coefficients import FitError
from evenload.runtime.device import seconds_now

FOLDS = 5


class CrossValidation(NamedTuple):
    """Holds predictions of packs that the fit has not seen; `seconds` float64[n], by timing."""

    seconds: NDArray[np.float64]
    error: FitError


def fit_relative(
    features: Sequence[Sequence[float]] | NDArray[np.float64], seconds: Sequence[float]
) -> tuple[float, ...]:
    """Return non-negative coefficients that minimise squared *relative* errors of features [n, k] to n seconds."""
    y = np.array(seconds)
    scaled: NDArray[np.float64] = np.array(features) / y[:, None]
    # Columns differ by ten orders of magnitude (pairs against packs); unit columns keep the solver exact.
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(scaled / norms, np.ones(len(y)))
    return tuple((solution / norms).tolist())


def cross_validate(
    features: Sequence[Sequence[float]], seconds: Sequence[float], packs: Sequence[object], folds: int = FOLDS
) -> CrossValidation:
    """Predict every timing by a fit to the other folds. `packs` names the pack of each of the n timings; packs go to
    folds in turn. `ValueError` for fewer than two packs."""
    order = {pack: index for index, pack in enumerate(dict.fromkeys(packs))}
    if len(order) < 2:
        raise ValueError(f"{len(order)} packs cannot be left out of a fit")
    folds = min(folds, len(order))
    fold_of = np.array([order[pack] % folds for pack in packs])
    x, y = np.array(features), np.array(seconds)
    predicted = np.empty(len(y))
    for fold in range(folds):
        seen = fold_of != fold
        predicted[~seen] = x[~seen] @ np.array(fit_relative(x[seen].tolist(), y[seen].tolist()))
    errors = np.abs(predicted / y - 1)
    median, p90 = np.quantile(errors, (0.5, 0.9)).tolist()
    return CrossValidation(predicted, FitError(packs=len(order), folds=folds, median=median, p90=p90))


_FAR_DEVIATIONS = 5.0
_NORMAL = 0.6745  # a normal distribution's median absolute deviation, as a share of its standard deviation
_LEAST_FAR_SHARE = 0.05  # clocks and interrupts: differences below this share of the median are never far


def num_outliers(seconds: Sequence[float]) -> int:
    """Count the repeats more than five robust standard deviations (median absolute deviation) from the median."""
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(one - middle) for one in seconds) / _NORMAL
    far_s = max(_FAR_DEVIATIONS * deviation, _LEAST_FAR_SHARE * middle)
    return sum(abs(one - middle) > far_s for one in seconds)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of some runs, after one to warm up."""
    work()
    return statistics.median(timed(work, device) for _ in range(repeats))


def timed(work: Callable[[], object], device: torch.device) -> float:
    start_s = seconds_now(device)
    work()
    return seconds_now(device) - start_s


class CoreWaits:
    """Measures how long threads wait for cores, from when it is made; `demand` is threads that this machine's ranks
    compute with, for each core they may use: above 1, ranks wait for each other in training too."""

    def __init__(self, demand: float) -> None:
        self._own_share = 1 - 1 / max(1.0, demand)
        self._from_s = time.perf_counter()
        self._before_s = _ready_without_core_s()

    def share(self) -> float:
        """Return the share of the time in which the thread that waited longest had no core; 0 where not known."""
        passed_s = max(time.perf_counter() - self._from_s, 1e-9)
        now_s = _ready_without_core_s()
        longest_s = max((waited - self._before_s.get(task, 0.0) for task, waited in now_s.items()), default=0.0)
        return min(1.0, max(0.0, longest_s / passed_s - self._own_share))


def spread_of_repeats(timings: list[list[float]]) -> float:
    """Return the relative distance of the mean of all packs' repeats from their minimum."""
    fastest = sum(min(repeats) for repeats in timings)
    means = sum(sum(repeats) / len(repeats) for repeats in timings)
    return means / fastest - 1 if fastest > 0 else 0.0


def _ready_without_core_s() -> dict[str, float]:
    waits_s = {}
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waits_s[task.parent.name] = int(task.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            continue  # A thread that has just ended, or a system that does not count.
    return waits_s
