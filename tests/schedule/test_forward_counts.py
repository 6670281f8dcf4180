import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from evenload.schedule.packflow import keep_counts
from evenload.schedule.static_schedules import one_f_one_b
from pipeline_cases import uniform_tasks


def test_injected_pack_of_slimpack_figure_9():
    """Five packs each way; the backward of pack 0 needs two forwards, pack 1 nothing new."""
    needed = np.array([2, 2, 4, 4, 5], dtype=np.int32)
    kind = one_f_one_b(uniform_tasks(needed.tolist(), 5, 1)).kind
    assert np.cumsum(kind == 0)[kind == 1].tolist() == [2, 2, 4, 4, 5], "without injection backwards catch up"
    assert keep_counts(needed, 5).tolist() == [2, 3, 4, 5, 5]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(12, 15))
def test_keep_follows_its_recurrence(needed, num_forward):
    expected = [needed[0]]
    for d in needed[1:]:
        expected.append(min(num_forward, max(d, expected[-1] + 1)))
    assert keep_counts(np.array(needed, dtype=np.int32), num_forward).tolist() == expected
