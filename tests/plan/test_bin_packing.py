import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.plan.packing import best_fit_decreasing, longest_first
from reference import bin_packing as reference

lengths = st.lists(st.integers(1, 50), max_size=40)


def column(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@given(lengths, st.integers(50, 120))
def test_best_fit_equals_its_definition(num_tokens, capacity):
    assert best_fit_decreasing(column(num_tokens), capacity) == reference.best_fit_decreasing(
        column(num_tokens), capacity
    )


@given(lengths, st.integers(1, 9), st.integers(50, 200))
def test_longest_first_equals_its_definition(num_tokens, num_groups, capacity):
    # Works with many ties, in another order than the lengths.
    work = [float((7 * t) % 11) for t in num_tokens]
    limits = {"num_tokens": column(num_tokens), "capacity": capacity}
    expected = reference.longest_first(np.array(work), num_groups, **limits)
    assert longest_first(np.array(work), num_groups, **limits) == expected


@given(st.lists(st.floats(0, 9), min_size=1, max_size=40), st.lists(st.floats(0, 50), min_size=1, max_size=7))
def test_groups_that_begin_with_work_equal_their_definition(work, loads):
    works, load_s = np.array(work), np.array(loads)
    expected = reference.longest_first(works, len(loads), load_s=load_s)
    assert longest_first(works, len(loads), load_s=load_s) == expected
    with pytest.raises(ConfigError, match="loads for"):
        longest_first(works, len(loads) + 1, load_s=load_s)


def test_a_document_over_capacity_is_named():
    with pytest.raises(InfeasiblePlanError, match="document 1 has 11 tokens, a pack holds 10"):
        best_fit_decreasing(column([3, 11]), 10)
    with pytest.raises(InfeasiblePlanError, match="document 0 has 12 tokens"):
        longest_first(np.array([1.0]), 2, num_tokens=column([12]), capacity=10)


def test_bad_inputs_are_refused():
    with pytest.raises(ConfigError, match="document 1 has 0 tokens"):
        best_fit_decreasing(column([3, 0]), 10)
    with pytest.raises(ConfigError, match="num_groups 0 at least 1"):
        longest_first(np.array([1.0]), 0)
    with pytest.raises(ConfigError, match="finite and not negative"):
        longest_first(np.array([np.nan]), 1)
    with pytest.raises(ConfigError, match="together, or neither"):
        longest_first(np.array([1.0]), 1, capacity=4)
    with pytest.raises(ConfigError, match="give 2 lengths"):
        longest_first(np.array([1.0, 2.0]), 1, num_tokens=column([4]), capacity=4)


@pytest.mark.parametrize("sizes", [[30, 29, 28, 5, 4, 3], [26] * 9, [50, 1, 49, 2, 25, 25, 26]])
@given(st.integers(1, 4), st.lists(st.floats(0, 9), min_size=9, max_size=9))
def test_groups_without_room_are_found_again_when_a_shorter_item_comes(sizes, num_groups, work):
    """The native core sets groups without room aside; sizes that do not descend with works make it take them back."""
    works = np.array(work[: len(sizes)])
    limits = {"num_tokens": column(sizes), "capacity": 50}
    assert longest_first(works, num_groups, **limits) == reference.longest_first(works, num_groups, **limits)


def test_many_groups_without_room_take_no_quadratic_time():
    """40,000 items over half a group each: looking at every group for each of them would take half a minute."""
    sizes = 16_385 + np.arange(40_000) % 100
    start_s = time.process_time()
    groups = longest_first(sizes.astype(float), 1, num_tokens=sizes, capacity=32_768)
    assert len(groups) == len(sizes)
    assert time.process_time() - start_s < 5
