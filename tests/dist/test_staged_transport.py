"""The transport of tests on one GPU (tests/gpu/test_ranks_on_one_gpu.py), here on a CPU: every kind of transfer."""

import pytest

from dist_equality import assert_plans_equal_plain
from staged_cases import CASES
from sweeps import sweep


@pytest.mark.parametrize("case", sweep(tuple(CASES), 2))
def test_ranks_on_one_device_equal_plain_training(gloo_pool, case):
    plans, settings = CASES[case]()
    assert_plans_equal_plain(gloo_pool, plans, staged_on="cpu", **settings)
