"""Coefficients from timed packs: non-negative least squares on relative errors, and how far they are off elsewhere.

    minimise  Σ (prediction / measured - 1)²   over coefficients >= 0

so that a small pack counts like a large one. The error that is told is of packs that the fit has not seen: packs are
dealt into k folds, each fold is predicted by a fit to the others (k-fold cross-validation). All repeats and all ranks'
timings of a pack are in the same fold, else the fit would have seen it.

Price: k + 1 solutions of n equations in five unknowns; milliseconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from evenload.cost.profile_record import FitError

FOLDS = 5


class LeftOut(NamedTuple):
    """What a fit says about packs that it has not seen.

    Args:
        seconds: float64[n], by timing.
    """

    seconds: NDArray[np.float64]
    error: FitError


def fit_relative(
    features: Sequence[Sequence[float]] | NDArray[np.float64], seconds: Sequence[float]
) -> tuple[float, ...]:
    """Non-negative coefficients that minimise squared *relative* errors.

    Args:
        features: n rows of one length.
        seconds: n, above 0.
    """
    y = np.array(seconds)
    scaled: NDArray[np.float64] = np.array(features) / y[:, None]
    # Columns differ by ten orders of magnitude (pairs against packs); unit columns keep the solver exact.
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(scaled / norms, np.ones(len(y)))
    return tuple((solution / norms).tolist())


def left_out(
    features: Sequence[Sequence[float]], seconds: Sequence[float], packs: Sequence[object], folds: int = FOLDS
) -> LeftOut:
    """Every timing predicted by a fit to the other folds.

    Args:
        packs: n, hashable: which pack was timed; packs are dealt to folds in turn, by their first timing.
        folds: at most as many as there are packs.

    Raises:
        ValueError: fewer than two packs.
    """
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
    return LeftOut(predicted, FitError(packs=len(order), folds=folds, median=median, p90=p90))
