import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.types.columns import WorkCurve
from reference.slice_bound import exact_slice_bound
from reference.slice_work import slice_work_s


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
            largest = max(largest, sum(slice_work_s(work, start, stop) for start, stop in pieces if stop > start))
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
