"""Calibration for a fraction of its time: where costs only have to be there, and not true to a percent."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def quick_calibration() -> Iterator[None]:
    """In this process. Other tests disturb every attempt, so there is one, of the fewest packs and repeats."""
    fewer = {"_MAX_ATTEMPTS": 1, "_WARM_UP_S": 0.0, "_TIME_BUDGET_S": 0.0}
    with mock.patch.multiple("evenload.calibrate.calibrate", **fewer):
        yield
