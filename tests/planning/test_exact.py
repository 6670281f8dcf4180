import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.planning.packing import longest_first
from evenload.planning.strategies.fixed import exact_groups


def groupings(count, num_groups):
    """All of them."""
    for owners in itertools.product(range(num_groups), repeat=count):
        yield [[item for item in range(count) if owners[item] == group] for group in range(num_groups)]


def largest(groups, weights) -> float:
    return max(sum(weights[item] for item in group) for group in groups)


ITEMS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(1, 3), st.integers(0, 30))
def test_fixed_length_packing_equals_brute_force(lengths, num_groups, slack) -> None:
    """WLB eq. 1 with d², from the worst start that fits."""
    work = np.array(lengths, float) ** 2
    capacity = max(*lengths, -(-sum(lengths) // num_groups)) + slack
    fitting = [groups for groups in groupings(len(lengths), num_groups) if largest(groups, lengths) <= capacity]
    if not fitting:
        return
    worst, best_s = max(fitting, key=lambda groups: largest(groups, work)), min(largest(g, work) for g in fitting)
    result = exact_groups(work, np.array(lengths, np.int64), capacity, start=worst)
    assert result.objective == pytest.approx(best_s, rel=1e-6)
    assert result.is_optimal
    assert sorted(itertools.chain(*result.groups)) == list(range(len(lengths)))
    assert largest(result.groups, lengths) <= capacity


def test_stopping_early_says_so_and_is_never_worse_than_the_start() -> None:
    generator = np.random.default_rng(5)
    tokens = generator.integers(1, 4000, 60)
    work = tokens.astype(float) ** 2
    start = longest_first(work, 13)
    result = exact_groups(work, tokens, int(tokens.sum()), start=start, time_limit_s=1e-3)
    assert result.objective <= max(work[group].sum() for group in start)
    assert result.bound <= result.objective
    assert result.gap > 0
    assert not result.is_optimal, "13 groups of 60 squares are not proved in a millisecond"


def test_without_items_there_is_nothing_to_do() -> None:
    assert exact_groups(np.zeros(0), np.zeros(0, np.int64), 1, start=[[], [], []]).groups == ((), (), ())


def test_missing_solver_is_named(monkeypatch) -> None:
    """Planning works without the extra; asking for it says what to install."""
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(ConfigError, match=r"evenload\[exact\]"):
        exact_groups(np.ones(4), np.ones(4, np.int64), 2, start=[[0, 1], [2, 3]])
