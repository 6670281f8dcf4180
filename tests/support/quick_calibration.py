"""Calibration for a fraction of its time: where costs only have to be there, and not true to a percent."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

from evenload.calibrate.fit import median_seconds

FEWEST = {"_WARM_UP_S": 0.0, "_TIME_BUDGET_S": 0.0, "_WEIGHT_REPEATS": 1}
ONCE = partial(median_seconds, repeats=1)


@contextmanager
def quick_calibration() -> Iterator[None]:
    """In this process: the fewest packs and repeats."""
    with mock.patch.multiple("evenload.calibrate.calibrate", **FEWEST, median_seconds=ONCE):
        yield
