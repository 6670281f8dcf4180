from hypothesis import given
from hypothesis import strategies as st

from reference.slice_work import prefix_pairs


@given(st.integers(0, 80), st.integers(0, 30))
def test_pairs_equal_a_count_of_visible_keys(num_tokens, window):
    assert prefix_pairs(num_tokens, window) == sum(min(t + 1, window or t + 1) for t in range(num_tokens))
