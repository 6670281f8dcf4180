"""Random plans through the real executor: they finish, and their gradients equal plain training."""

import pytest

from dist_equality import assert_plans_equal_plain
from plan_building import random_plan
from sweeps import sweep


@pytest.mark.parametrize(("pp", "dp", "count"), [(1, 1, 10), (2, 1, 12), (4, 1, 12), (2, 2, 12), (1, 3, 12), (4, 2, 8)])
def test_random_plans_run_and_equal_plain_training(gloo_pool, pp, dp, count):
    """No deadlock and no wrong gradient, for any cuts, any legal f and w, replicas with or without documents."""
    plans = [random_plan(1000 * pp + 100 * dp + i, num_layers=4, pp=pp, dp=dp) for i in sweep(range(count), count // 4)]
    assert any(len(p.forward) != len(p.backward) for plan in plans for p in plan.pack_plans)
    if dp > 1:
        assert any(not p.forward for plan in plans for p in plan.pack_plans), "a replica without documents is covered"
    assert_plans_equal_plain(gloo_pool, plans)
