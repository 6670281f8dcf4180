"""Greedy variable-length packing: the definition, limits."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.planning.packing import (
    LEFT_OVER,
    assign_replicas,
    best_fit_decreasing,
    longest_first,
    members_of,
    pack_greedily,
)
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


@pytest.mark.parametrize(
    ("pack", "error", "match"),
    [
        (
            lambda: best_fit_decreasing(column([3, 11]), 10),
            InfeasiblePlanError,
            "document 1 has 11 tokens, a pack holds 10",
        ),
        (
            lambda: longest_first(np.ones(1), 2, num_tokens=column([12]), capacity=10),
            InfeasiblePlanError,
            "document 0 has 12 tokens",
        ),
        (lambda: best_fit_decreasing(column([3, 0]), 10), ConfigError, "document 1 has 0 tokens"),
        (lambda: longest_first(np.ones(1), 0), ConfigError, "num_groups 0 at least 1"),
        (lambda: longest_first(np.array([np.nan]), 1), ConfigError, "finite and not negative"),
        (lambda: longest_first(np.ones(1), 1, load_s=-np.ones(1)), ConfigError, "load_s.*finite and not negative"),
        (lambda: longest_first(np.ones(1), 1, capacity=4), ConfigError, "together, or neither"),
        (lambda: longest_first(np.ones(2), 1, num_tokens=column([4]), capacity=4), ConfigError, "give 2 lengths"),
        (lambda: pack_greedily(np.ones(2), column([1]), 1, 4), ConfigError, "as many lengths"),
        (lambda: pack_greedily(np.ones(1), column([1]), 0, 4), ConfigError, "num_groups 0 at least 1"),
        (lambda: pack_greedily(-np.ones(1), column([1]), 1, 4), ConfigError, "finite and not negative"),
        (lambda: pack_greedily(np.array([np.nan]), column([1]), 1, 4), ConfigError, "finite and not negative"),
        (lambda: pack_greedily(np.ones(1), column([0]), 1, 4), ConfigError, "each at least 1"),
    ],
)
def test_bad_inputs_are_refused(pack, error, match):
    with pytest.raises(error, match=match):
        pack()


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


documents = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.5, 7.0])), max_size=50)


def plain_greedy(work: list[float], sizes: list[int], num_groups: int, limit: float) -> list[int]:
    """The definition, O(n · groups): look at every group."""
    load, tokens = [0.0] * num_groups, [0] * num_groups
    result = []
    for cost, size in zip(work, sizes, strict=True):
        for key in (load, tokens):
            group = min(range(num_groups), key=lambda g, key=key: (key[g], g))
            if tokens[group] + size <= limit:
                load[group] += cost
                tokens[group] += size
                result.append(group)
                break
        else:
            result.append(LEFT_OVER)
    return result


@given(documents, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 120)))
def test_greedy_packing_equals_its_definition(items, num_groups, capacity):
    sizes, work = [size for size, _ in items], [cost for _, cost in items]
    expected = plain_greedy(work, sizes, num_groups, np.inf if capacity is None else capacity)
    got = pack_greedily(np.array(work), np.array(sizes, np.int64), num_groups, capacity)
    assert got.tolist() == expected


def test_members_keep_the_order_of_placement_and_empty_groups():
    group_of = np.array([2, 0, LEFT_OVER, 2, 0])
    assert members_of(group_of, np.array([9, 8, 7, 6, 5]), 4) == [[8, 5], [], [9, 6], []]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(2, 3))
def test_assignment_is_within_the_classic_bound_of_the_optimum(works: list[int], dp: int) -> None:
    """Graham 1969: LPT is at most 4/3 - 1/(3·dp) of the optimum; brute force for n <= 8."""
    work_s = np.array(works, np.float64)
    result = max(work_s[group].sum() for group in assign_replicas(work_s, dp))
    optimum = min(
        max(sum(w for w, r in zip(works, ranks, strict=True) if r == rank) for rank in range(dp))
        for ranks in itertools.product(range(dp), repeat=len(works))
    )
    assert result <= optimum * (4 / 3 - 1 / (3 * dp)) + 1e-9


@given(st.lists(st.floats(0, 10), max_size=30), st.integers(1, 5))
def test_every_document_goes_to_one_replica_in_arrival_order(works: list[float], dp: int) -> None:
    groups = assign_replicas(np.array(works, np.float64), dp)
    assert len(groups) == dp
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(works)))
    assert all((np.diff(group) > 0).all() for group in groups)
