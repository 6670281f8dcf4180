"""Calibration for a fraction of its time: where costs only have to be there, and not true to a percent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from evenload.calibrate.fit import median_seconds


@contextmanager
def quick_calibration() -> Iterator[None]:
    """In this process. Other tests disturb every attempt, so there is one, of the fewest packs and repeats."""
    fewer = {"_MAX_ATTEMPTS": 1, "_WARM_UP_S": 0.0, "_TIME_BUDGET_S": 0.0, "median_seconds": seconds_once}
    with (
        mock.patch.multiple("evenload.calibrate.calibrate", **fewer),
        mock.patch("evenload.calibrate.kernels._REPEATS", 1),
    ):
        yield


def seconds_once(work: Callable[[], object], device: torch.device) -> float:
    return median_seconds(work, device, 1)
