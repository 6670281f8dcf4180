"""Documents that several ranks share train like plain single-process training."""

import msgspec

from cost_samples import documents
from dist_equality import assert_plans_equal_plain
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout
from evenload.types.model import model_from_hf_config
from reference_training import tiny_config
from steep_costs import STEEP_COSTS

COSTS = msgspec.structs.replace(STEEP_COSTS, host_link=None)
LENGTHS = [64, 1, 9, 30, 1, 17, 5, 2, 41, 12, 1, 25]


def planned(strategy, layout, options=None, kind="llama", lengths=LENGTHS):
    """The strategy's own plan of these documents."""
    model = model_from_hf_config(tiny_config(kind).to_dict(), kind, 8)
    planner = StepPlanner(model, COSTS, layout, None, options or PlanOptions(max_pack_tokens=64), host="unlimited")
    step = documents(lengths)
    plan = planner.plan(0, step, strategy)
    validate_plan(plan, max_pack_tokens=planner.options.max_pack_tokens)
    return plan


def assert_equal(pool, plans, exchange="all_gather", **options):
    for plan in plans:
        validate_plan(plan)
    return assert_plans_equal_plain(pool, plans, exchange=exchange, **options)


def test_what_runs_ahead_of_shared_packs_equals_plain_training(gloo_pool):
    """Own forwards stand before the last shared backwards."""
    layout = even_layout(4, dp=2, pp=2)
    lengths = [64, 64, 64, *[6] * 12]
    plan = planned("auto", layout, PlanOptions(max_pack_tokens=64, dp_merge=True), lengths=lengths)
    row = plan.schedules[0].ranks[0]
    alone = {pack.index for pack in plan.pack_plans[0].forward if pack.slices[0].cp == 1}
    shared = {pack.index for pack in plan.pack_plans[0].backward if pack.slices[0].cp > 1}
    assert alone
    assert shared
    first_own = next(at for at, action in enumerate(row) if action.kind == "F" and action.pack in alone)
    last_shared = max(at for at, action in enumerate(row) if action.kind != "F" and action.pack in shared)
    assert first_own < last_shared
    assert_plans_equal_plain(gloo_pool, [plan])
