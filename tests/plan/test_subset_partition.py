import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.plan.subset_partition import best_partition

COSTS = st.integers(0, 5).flatmap(
    lambda items: st.lists(
        st.one_of(st.floats(0, 100), st.just(np.inf)), min_size=(1 << items) - 1, max_size=(1 << items) - 1
    )
)


def slowest_worker(cost, load, found) -> float:
    return max(base + sum(cost[mask] for mask in masks) for base, masks in zip(load, found, strict=True))


def partitions(items: list[int]):
    """All partitions of some items, as bit masks."""
    if not items:
        yield []
        return
    first, *rest = items
    for count in range(len(rest) + 1):
        for others in itertools.combinations(rest, count):
            mask = sum(1 << item for item in (first, *others))
            for below in partitions([item for item in rest if item not in others]):
                yield [mask, *below]


@settings(max_examples=120, deadline=None)
@given(COSTS, st.lists(st.floats(0, 50), min_size=1, max_size=3))
def test_the_partition_is_the_best_of_all(costs, load) -> None:
    cost = np.array([0.0, *costs])
    items = list(range(len(cost).bit_length() - 1))
    found = best_partition(cost, load)
    assert sorted(bit for masks in found for mask in masks for bit in items if mask >> bit & 1) == items
    best = min(
        max(
            base + sum(cost[mask] for mask, worker in zip(masks, workers, strict=True) if worker == number)
            for number, base in enumerate(load)
        )
        for masks in partitions(items)
        for workers in itertools.product(range(len(load)), repeat=len(masks))
    )
    assert slowest_worker(cost, load, found) == pytest.approx(best, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(COSTS, st.lists(st.floats(0, 50), min_size=1, max_size=3))
def test_native_equals_python(costs, load) -> None:
    cost = np.array([0.0, *costs])
    assert best_partition(cost, load) == best_partition(cost, load, backend="python")


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="not 2\\^n"):
        best_partition(np.zeros(3), [0.0])
    with pytest.raises(ValueError, match="at least one worker"):
        best_partition(np.zeros(4), [])
    with pytest.raises(ValueError, match="cost of no items"):
        best_partition(np.ones(4), [0.0])
