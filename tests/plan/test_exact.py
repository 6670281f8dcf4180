import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.plan.bin_packing import longest_first
from evenload.plan.exact import exact_groups, exact_slice_bound
from evenload.plan.partition import partition_by_work
from evenload.types.work import WorkCurve


def brute_force(work, num_groups, num_tokens=None, capacity=None) -> float:
    """Least work of the largest group over all assignments; infinite when none keeps the capacity."""
    best = float("inf")
    for owners in itertools.product(range(num_groups), repeat=len(work)):
        owners = np.array(owners, np.int64)
        if capacity is not None and np.bincount(owners, weights=num_tokens).max(initial=0) > capacity:
            continue
        best = min(best, np.bincount(owners, weights=work).max(initial=0.0))
    return best


ITEMS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(1, 3), st.integers(0, 30))
def test_fixed_length_packing_equals_brute_force(lengths, num_groups, slack) -> None:
    """WLB eq. 1 with d²: the solver's answer is the optimum, or it says that there is none."""
    tokens = np.array(lengths, np.int64)
    capacity = max(int(tokens.max()), -(-int(tokens.sum()) // num_groups)) + slack
    best = brute_force(tokens.astype(float) ** 2, num_groups, tokens, capacity)
    if best == float("inf"):
        with pytest.raises(InfeasiblePlanError, match="do not fit"):
            exact_groups(tokens.astype(float) ** 2, num_groups, num_tokens=tokens, capacity=capacity)
        return
    found = exact_groups(tokens.astype(float) ** 2, num_groups, num_tokens=tokens, capacity=capacity)
    assert found.objective == pytest.approx(best, rel=1e-6)
    assert found.is_optimal
    assert sorted(itertools.chain(*found.groups)) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in group) for group in found.groups) <= capacity


@settings(max_examples=40, deadline=None)
@given(ITEMS, st.integers(1, 4))
def test_assignment_without_limit_equals_brute_force(lengths, num_groups) -> None:
    """SlimPack phase 1 and WLB eq. 2 without S_max; LPT is never better and within Graham's bound."""
    work = np.array(lengths, float) * (1 + np.array(lengths, float) / 20)
    best = brute_force(work, num_groups)
    assert exact_groups(work, num_groups).objective == pytest.approx(best, rel=1e-6)
    largest = max(work[group].sum() for group in longest_first(work, num_groups) if group)
    assert best * (1 - 1e-9) <= largest <= best * (4 / 3) * (1 + 1e-9)


def test_stopping_early_says_so_and_is_never_worse_than_the_start() -> None:
    generator = np.random.default_rng(5)
    tokens = generator.integers(1, 4000, 60)
    work = tokens.astype(float) ** 2
    start = longest_first(work, 13)
    found = exact_groups(work, 13, time_limit_s=1e-3, start=start)
    assert found.objective <= max(work[group].sum() for group in start)
    assert found.bound <= found.objective
    assert found.gap > 0 or found.is_optimal
    assert not found.is_optimal, "13 groups of 60 squares are not proved in a millisecond"


def test_without_items_there_is_nothing_to_do() -> None:
    assert exact_groups(np.zeros(0), 3).groups == ((), (), ())


def test_missing_solver_is_named(monkeypatch) -> None:
    """Planning works without the extra; asking for it says what to install."""
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ConfigError, match=r"evenload\[exact\]"):
        exact_groups(np.ones(4), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_groups": 0}, "num_groups 0"),
        ({"num_groups": 2, "time_limit_s": 0.0}, "time_limit_s 0.0"),
        ({"num_groups": 2, "capacity": 5}, "together"),
        ({"num_groups": 2, "num_tokens": np.ones(3, np.int64), "capacity": 5}, "one per item"),
    ],
)
def test_bad_arguments_are_refused(arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        exact_groups(np.ones(4), **arguments)


def brute_force_slices(lengths, work: WorkCurve, num_packs: int, cap: int) -> float:
    """Least largest pack over all cuts of the token line into at most `num_packs` packs."""
    total = sum(lengths)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    best = float("inf")
    for cuts in itertools.combinations_with_replacement(range(total + 1), num_packs - 1):
        bounds = [0, *cuts, total]
        largest = 0.0
        for low, high in itertools.pairwise(bounds):
            if high - low > cap:
                break
            pieces = [(max(low, a) - a, min(high, b) - a) for a, b in itertools.pairwise(edges)]
            largest = max(largest, sum(work.slice_work_s(start, stop) for start, stop in pieces if stop > start))
        else:
            best = min(best, largest)
    return best


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.7]),
)
def test_slice_bound_equals_brute_force(lengths, num_packs, slack, slice_s) -> None:
    work = WorkCurve(linear_s=1.0, attention_s=((0.3, 0),), slice_s=slice_s)
    cap = -(-sum(lengths) // num_packs) + slack
    tokens, order = np.array(lengths, np.int64), np.arange(len(lengths), dtype=np.int64)
    bound = exact_slice_bound(tokens, order, work, num_packs, max_pack_tokens=cap)
    assert bound == pytest.approx(brute_force_slices(lengths, work, num_packs, cap), rel=1e-8)


def test_slice_bound_is_below_the_fill_and_infinite_beyond_the_cap() -> None:
    generator = np.random.default_rng(0)
    work = WorkCurve(linear_s=1.0, attention_s=((0.01, 0),), slice_s=0.5)
    for _ in range(30):
        tokens = generator.integers(1, 400, 12)
        order = np.argsort(-tokens).astype(np.int64)
        bound = exact_slice_bound(tokens, order, work, 8)
        packs = partition_by_work(tokens, order.astype(np.int32), work, 8)
        largest = packs.pack_sums(work.slice_works_s(packs.start, packs.stop)).max()
        assert bound <= largest * (1 + 1e-9)
    assert exact_slice_bound(np.array([10, 10]), np.array([0, 1]), work, 2, max_pack_tokens=9) == float("inf")
