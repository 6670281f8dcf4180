"""Documents to replicas of different paces."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.plan.packing.bin_packing import assign_replicas
from evenload.plan.packing.paced_replicas import deal_by_pace, deal_until_even

WORKS = st.lists(st.floats(0, 100), max_size=30)
PACES = st.lists(st.floats(0.5, 3), min_size=1, max_size=5)


@given(WORKS, PACES)
def test_every_document_goes_to_one_replica_in_arrival_order(works, paces):
    groups = assign_replicas(np.array(works, np.float64), len(paces), np.array(paces))
    assert len(groups) == len(paces)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(works)))
    assert all((np.diff(group) > 0).all() for group in groups)


@given(WORKS, PACES, st.floats(0, 50))
def test_no_replica_is_late_by_more_than_the_longest_document(works, paces, start):
    """Were the slowest replica's last document elsewhere, that replica would end no earlier: so all ends lie within one
    document of each other, where all began together."""
    work_s, pace = np.array(works, np.float64), np.array(paces)
    starts = np.full(len(paces), start)
    ends = starts + [float(pace[i] * work_s[group].sum()) for i, group in enumerate(deal_by_pace(work_s, pace, starts))]
    assert ends.max() <= ends.min() + max(paces) * max(works, default=0.0) + 1e-6


@pytest.mark.parametrize(("dp", "count"), [(2, 10), (3, 11)])
def test_small_batches_are_within_5_percent_of_the_optimum(dp, count):
    """Brute force over all assignments, for works of every spread and replicas up to twice as slow."""
    rng = np.random.default_rng(3)
    homes = np.array(list(itertools.product(range(dp), repeat=count)))
    for spread in np.repeat([0.3, 1.0, 1.5], 8):
        work_s, pace = rng.lognormal(0, spread, count), rng.uniform(1, 2, dp)
        groups = deal_by_pace(work_s, pace)
        found = max(pace[i] * work_s[group].sum() for i, group in enumerate(groups))
        loads = np.stack([pace[i] * ((homes == i) * work_s).sum(axis=1) for i in range(dp)])
        assert found <= 1.05 * loads.max(axis=0).min()


def test_work_follows_pace_and_what_a_replica_has_to_do_before():
    equal = np.ones(300)
    assert [len(group) for group in deal_by_pace(equal, np.array([1.0, 2.0]))] == [200, 100]
    assert [len(group) for group in deal_by_pace(equal, np.ones(2), np.array([0.0, 100.0]))] == [200, 100]
    assert [len(group) for group in deal_by_pace(equal, np.ones(2), np.array([0.0, 1000.0]))] == [300, 0]


def test_an_exchange_mends_what_longest_first_leaves():
    """5, 4 and 3, 3, 3 on two equal replicas: longest first ends at 10, 9 and 9 is possible."""
    groups = deal_by_pace(np.array([5.0, 4.0, 3.0, 3.0, 3.0]), np.ones(2))
    assert sorted(sum([5.0, 4.0, 3.0, 3.0, 3.0][i] for i in group) for group in groups) == [9.0, 9.0]


def test_dealing_again_by_what_a_plan_took():
    """A replica that takes a constant beside its documents has another pace than its ranks."""
    work_s, start_s = np.ones(120), np.array([0.0, 30.0])
    deals = []

    def plan(groups):
        deals.append([len(group) for group in groups])
        return groups

    def seconds_of(groups):
        return start_s + [float(work_s[group].sum()) for group in groups]

    best = deal_until_even(
        work_s,
        np.ones(2),
        plan,
        outcome=lambda groups: (groups, seconds_of(groups)),
        worth=lambda groups: seconds_of(groups).max(),
    )
    assert deals[0] == [60, 60]
    assert len(deals) == 3
    assert seconds_of(best).max() == min(max(a, b + 30) for a, b in deals) < 80
    assert deal_until_even(work_s, np.ones(2), lambda groups: None, outcome=None, worth=None) is None
