"""`parallel.channels = "fifo"`: one group and one queue for each pair of ranks, through the real executor.

tests/dist/test_matrix.py has it together with everything else; here are more packs, and sends that are let go.
"""

import pytest

from context_plans import merged_plan
from dist_equality import assert_plans_equal_plain
from evenload.stepplan.transfer_order import LAG
from sweeps import sweep
from varied_plans import SCHEDULES, varied_plan

LAYERS = 4


@pytest.mark.parametrize(("pp", "dp", "virtual"), sweep([(4, 1, 1), (2, 2, 2), (2, 1, 1), (2, 2, 1), (2, 1, 2)], 1))
def test_plans_with_policies_and_splits_equal_plain_training(gloo_pool, pp, dp, virtual):
    """With virtual stages two ranks are neighbours three times: all of it arrives in the order in which it is sent."""
    schedules = SCHEDULES if virtual == 1 else ("list", *("list_split",) * 4)
    plans = [
        varied_plan(
            7919 * seed + 131 * pp + 17 * dp + virtual, num_layers=LAYERS, pp=pp, dp=dp, virtual=virtual, schedule=name,
            num_documents=20, max_tokens=10, max_budget=10,
        )
        for seed, name in enumerate(schedules)
    ]  # fmt: skip
    assert any("I" in plan.schedules[0].grid() for plan in plans)
    measured = assert_plans_equal_plain(gloo_pool, plans, channels="fifo")
    assert all(rank.most_sends_kept <= LAG + 1 for ranks in measured for rank in ranks)
    if virtual == 1:
        assert any(rank.most_sends_kept == LAG + 1 for ranks in measured for rank in ranks), "some were freed"


def test_three_ranks_in_a_ring_equal_plain_training(gloo_pool):
    """With virtual stages the last rank sends to the first."""
    plans = [
        varied_plan(seed, num_layers=6, pp=3, virtual=2, schedule=name, num_documents=12, max_budget=20)
        for seed, name in enumerate(("list", "list_split"))
    ]
    assert_plans_equal_plain(gloo_pool, plans, changes={"num_hidden_layers": 6}, channels="fifo")


def test_replicas_that_share_documents_equal_plain_training(gloo_pool):
    """They meet between their transfers."""
    plans = [merged_plan(seed, dp=2, pp=2) for seed in sweep(range(5), 2)]
    assert any(piece.cp == 2 for plan in plans for pack in plan.pack_plans[0].forward for piece in pack.slices)
    assert_plans_equal_plain(gloo_pool, plans, channels="fifo")
