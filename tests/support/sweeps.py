"""Sweeps over seeds and layouts: a few of each in every run, all of them where one looks further.

`make test` has minutes; the axes that matter meet in tests/dist/test_matrix.py in any case. `make test-thorough`
(`--hypothesis-profile=explore`) runs whole sweeps and new random examples.
"""

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings

Value = TypeVar("Value")

LOOKS_FURTHER = settings.get_current_profile_name() == "explore"

thorough = pytest.mark.skipif(not LOOKS_FURTHER, reason="the same elsewhere or at another size: make test-thorough")
"""Tests of what others show already, through one more command, exchange or kind of loss."""


def spread(values: Sequence[Value], few: int) -> Sequence[Value]:
    """All of them, or in the profile that every run has so many from the whole range."""
    return values if LOOKS_FURTHER or len(values) <= few else [values[i * len(values) // few] for i in range(few)]


def sweep(values: Sequence[Value], few: int) -> Sequence[Value]:
    """All of them, or in the profile that every run has the first `few`."""
    return values if LOOKS_FURTHER else values[:few]
