"""Keys and values that travel in parts: whatever travels when, attention gives the same.

But for the last bits: kernels round in an order that depends on where rows lie in memory, and collectives add ranks'
gradients in one that depends on their place in the buffer.
"""

import pytest
import torch

from context_cases import GROUPS, HEADS, attend_shared_packs
from context_plans import RULES, context_plan, in_parts, merged_plan
from evenload.errors import InvalidPlanError
from evenload.runtime.replay.head_parts import head_parts
from evenload.stepplan.validate import validate_plan
from evenload.types.plan import StepPlan, encode_plan
from sweeps import sweep


def assert_equal(pool, plans: list[StepPlan], *, window=0, backend="cpu_flash", dtype=torch.float64, rtol=1e-12):
    """In as many parts as there are key heads, and in one, whose equality with whole documents has tests of its own
    (tests/dist/test_context_attention.py)."""
    apart = [in_parts(plan, GROUPS) for plan in plans]
    for plan in apart:
        validate_plan(plan)
    encoded = [encode_plan(plan) for plan in (*plans, *apart)]
    world = plans[0].layout.dp * plans[0].layout.cp
    for rank in pool.run(world, attend_shared_packs, encoded, "all_gather", dtype, window, backend):
        for (one, one_bytes), (other, other_bytes) in zip(rank[: len(plans)], rank[len(plans) :], strict=True):
            assert one_bytes == other_bytes, "as much travels in all"
            for doc_id, tensors in one.items():
                for name, expected in tensors.items():
                    torch.testing.assert_close(other[doc_id][name], expected, equal_nan=True, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("cp", sweep([3, 2, 5, 6], 2))
def test_parts_change_nothing(gloo_pool, cp):
    """Groups of any size, every sharding rule, documents cut or not."""
    plans = [context_plan(200 * cp + i, cp=cp, rule=RULES[i % len(RULES)]) for i in sweep(range(12), 6)]
    assert_equal(gloo_pool, plans)


def test_nor_with_a_window_or_another_backend(gloo_pool):
    plans = [context_plan(300 + i, cp=2, rule=RULES[i]) for i in range(4)]
    assert_equal(gloo_pool, plans, window=7)
    assert_equal(gloo_pool, plans[:2], backend="reference")
    assert_equal(gloo_pool, plans[:2], dtype=torch.bfloat16, rtol=2**-7)


@pytest.mark.parametrize(("dp", "cp"), sweep([(3, 1), (2, 2), (4, 1), (5, 1), (6, 1)], 2))
def test_nor_where_replicas_share_documents(gloo_pool, dp, cp):
    """DP-Merge, by blocks of two and three too."""
    rules = ["per_document", "per_sequence", "owners", "dacp"]
    plans = [merged_plan(10 * dp + i, dp=dp, cp=cp, rule=rules[i % len(rules)]) for i in sweep(range(8), 4)]
    assert_equal(gloo_pool, plans)


def test_heads_are_divided_evenly_and_small_parts_come_first():
    assert [(part.keys.stop - part.keys.start) for part in head_parts(32, 8, 3)] == [2, 3, 3]
    assert [(part.queries.start, part.queries.stop) for part in head_parts(32, 8, 3)] == [(0, 8), (8, 20), (20, 32)]
    assert head_parts(HEADS, GROUPS, 1) == ((slice(0, GROUPS), slice(0, HEADS)),)
    with pytest.raises(InvalidPlanError, match="in 3 parts, but this rank has 2 key heads"):
        head_parts(4, 2, 3)
