import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.types.columns import WorkCurve
from reference.slice_work import prefix_pairs, slice_work_s


@given(st.integers(0, 80), st.integers(0, 30))
def test_pairs_equal_a_count_of_visible_keys(num_tokens, window):
    assert prefix_pairs(num_tokens, window) == sum(min(t + 1, window or t + 1) for t in range(num_tokens))


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 2000)), min_size=1), st.sampled_from([0, 7, 300]))
def test_columns_equal_single_slices_to_the_bit(slices, window):
    work = WorkCurve(linear_s=0.1, attention_s=((0.003, 0), (0.7, window)), slice_s=1e-3)
    start = np.array([a for a, _ in slices])
    stop = np.array([a + n for a, n in slices])
    assert work.slice_works_s(start, stop).tolist() == [slice_work_s(work, a, a + n) for a, n in slices]
