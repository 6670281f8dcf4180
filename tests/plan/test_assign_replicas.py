import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.plan.packing import assign_replicas


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(2, 3))
def test_assignment_is_within_the_classic_bound_of_the_optimum(works: list[int], dp: int) -> None:
    """Graham 1969: LPT is at most 4/3 - 1/(3·dp) of the optimum; brute force for n <= 8."""
    work_s = np.array(works, np.float64)
    found = max(work_s[group].sum() for group in assign_replicas(work_s, dp))
    optimum = min(
        max(sum(w for w, r in zip(works, ranks, strict=True) if r == rank) for rank in range(dp))
        for ranks in itertools.product(range(dp), repeat=len(works))
    )
    assert found <= optimum * (4 / 3 - 1 / (3 * dp)) + 1e-9


@given(st.lists(st.floats(0, 10), max_size=30), st.integers(1, 5))
def test_every_document_goes_to_one_replica_in_arrival_order(works: list[float], dp: int) -> None:
    groups = assign_replicas(np.array(works, np.float64), dp)
    assert len(groups) == dp
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(works)))
    assert all((np.diff(group) > 0).all() for group in groups)
