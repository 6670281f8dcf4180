"""Greedy variable-length packing: the definition, limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.plan.packing import LEFT_OVER, members_of, pack_greedily

documents = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.5, 7.0])), max_size=50)


def plain_greedy(work: list[float], sizes: list[int], num_groups: int, limit: float) -> list[int]:
    """The definition, O(n · groups): look at every group."""
    load, tokens = [0.0] * num_groups, [0] * num_groups
    found = []
    for cost, size in zip(work, sizes, strict=True):
        for key in (load, tokens):
            group = min(range(num_groups), key=lambda g, key=key: (key[g], g))
            if tokens[group] + size <= limit:
                load[group] += cost
                tokens[group] += size
                found.append(group)
                break
        else:
            found.append(LEFT_OVER)
    return found


@given(documents, st.integers(1, 9), st.one_of(st.none(), st.integers(1, 120)))
def test_greedy_packing_equals_its_definition(items, num_groups, capacity):
    sizes, work = [size for size, _ in items], [cost for _, cost in items]
    expected = plain_greedy(work, sizes, num_groups, np.inf if capacity is None else capacity)
    got = pack_greedily(np.array(work), np.array(sizes, np.int64), num_groups, capacity)
    assert got.tolist() == expected


def test_members_keep_the_order_of_placement_and_empty_groups():
    group_of = np.array([2, 0, LEFT_OVER, 2, 0])
    assert members_of(group_of, np.array([9, 8, 7, 6, 5]), 4) == [[8, 5], [], [9, 6], []]


def test_bad_columns_are_refused():
    one = np.ones(1, np.int64)
    with pytest.raises(ConfigError, match="as many lengths"):
        pack_greedily(np.ones(2), one, 1, 4)
    with pytest.raises(ConfigError, match="num_groups 0 at least 1"):
        pack_greedily(np.ones(1), one, 0, 4)
    for work, size in ((-1.0, 1), (np.nan, 1), (1.0, 0)):
        with pytest.raises(ConfigError, match=r"finite and not negative|each at least 1"):
            pack_greedily(np.array([work]), np.array([size]), 1, 4)
