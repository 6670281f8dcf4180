"""Documents that several ranks share train like plain single-process training."""

import pytest

from context_plans import RULES, context_plan, merged_plan
from dist_equality import assert_plans_equal_plain
from evenload.plan.cp_sharding import ShardingCost
from evenload.plan.validate import validate_plan
from evenload.types.work import WorkCurve

COST = ShardingCost(WorkCurve(1.0, ((0.05, 0),), 0.5), tile=4, gather_s_per_token=0.1)


def assert_equal(pool, plans, exchange="all_gather", **options):
    for plan in plans:
        validate_plan(plan)
    return assert_plans_equal_plain(pool, plans, exchange=exchange, sharding_cost=COST, **options)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize(("cp", "pp", "dp"), [(2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_shared_packs_equal_plain_training(gloo_pool, cp, pp, dp, exchange):
    """Every sharding rule, random cuts that differ between forward and backward, any length, in a pipeline too."""
    plans = [context_plan(1000 * cp + 100 * pp + i, cp=cp, pp=pp, dp=dp, rule=RULES[i % len(RULES)]) for i in range(10)]
    assert any(d.num_tokens < cp for plan in plans for d in plan.documents)
    assert any(s.start for plan in plans for p in plan.pack_plans for pack in p.forward for s in pack.slices)
    assert_equal(gloo_pool, plans, exchange)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize(("dp", "pp", "cp"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_dp_merge_equals_plain_training(gloo_pool, dp, pp, cp, exchange):
    """Documents of all replicas, of blocks inside and of single replicas in one step."""
    rules = ["per_document", "mixed", "dacp"]
    plans = [merged_plan(100 * dp + 10 * pp + i, dp=dp, pp=pp, cp=cp, rule=rules[i % len(rules)]) for i in range(6)]
    assert_equal(gloo_pool, plans, exchange)
