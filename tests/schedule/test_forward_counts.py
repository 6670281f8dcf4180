import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.schedule.forward_counts import catch_up_counts, keep_counts


def test_injected_pack_of_slimpack_figure_9():
    """Five packs each way; the backward of pack 0 needs two forwards, pack 1 nothing new."""
    needed = np.array([2, 2, 4, 4, 5], dtype=np.int32)
    assert catch_up_counts(needed).tolist() == [2, 2, 4, 4, 5]
    assert keep_counts(needed, 5).tolist() == [2, 3, 4, 5, 5]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(12, 15))
def test_keep_follows_its_recurrence(needed, num_forward):
    expected = [needed[0]]
    for d in needed[1:]:
        expected.append(min(num_forward, max(d, expected[-1] + 1)))
    assert keep_counts(np.array(needed, dtype=np.int32), num_forward).tolist() == expected


@pytest.mark.parametrize("counts", [catch_up_counts, lambda needed: keep_counts(needed, 0)])
def test_no_backwards_have_no_counts(counts):
    assert len(counts(np.zeros(0, dtype=np.int32))) == 0
