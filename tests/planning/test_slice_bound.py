"""The bound that `benchmarks/exact_gaps.py` holds slice packing against."""

import itertools
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.types.columns import WorkCurve
from reference.slice_work import slice_work_s

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def exact_slice_bound():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return runpy.run_path(str(BENCHMARKS / "exact_gaps.py"))["exact_slice_bound"]


def brute_force(lengths: list[int], work: WorkCurve, num_packs: int) -> float:
    """Least largest pack over all cuts of the token line into at most `num_packs` packs."""
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    largest = []
    for cuts in itertools.combinations_with_replacement(range(edges[-1] + 1), num_packs - 1):
        packs = [
            sum(
                slice_work_s(work, max(low, a) - a, min(high, b) - a)
                for a, b in itertools.pairwise(edges)
                if max(low, a) < min(high, b)
            )
            for low, high in itertools.pairwise([0, *cuts, edges[-1]])
        ]
        largest.append(max(packs))
    return min(largest)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([0.0, 0.7]))
def test_the_bound_equals_brute_force(exact_slice_bound, lengths, num_packs, slice_s) -> None:
    work = WorkCurve(linear_s=1.0, attention_s=((0.3, 0),), slice_s=slice_s)
    bound = exact_slice_bound(np.array(lengths), np.arange(len(lengths)), work, num_packs)
    assert bound == pytest.approx(brute_force(lengths, work, num_packs), rel=1e-8)
