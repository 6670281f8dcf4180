"""Documents that several ranks share train like plain single-process training."""

import msgspec
import pytest

from context_plans import RULES, context_plan, merged_plan
from dist_equality import assert_plans_equal_plain
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.model import model_from_hf_config
from reference_training import tiny_config
from steep_costs import STEEP_COSTS
from sweeps import sweep

COSTS = msgspec.structs.replace(STEEP_COSTS, host_link=None)
LENGTHS = [64, 1, 9, 30, 1, 17, 5, 2, 41, 12, 1, 25]


def planned(strategy, layout, options=None, kind="llama", lengths=LENGTHS):
    """The strategy's own plan of these documents."""
    model = model_from_hf_config(tiny_config(kind).to_dict(), kind, 8)
    planner = StepPlanner(model, COSTS, layout, None, options or PlanOptions(max_pack_tokens=64), host="unlimited")
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))
    plan = planner.plan(0, documents, strategy)
    validate_plan(plan, max_pack_tokens=planner.options.max_pack_tokens)
    return plan


def shared_slices(plans):
    return [s for plan in plans for p in plan.pack_plans for pack in p.forward for s in pack.slices if s.cp > 1]


def assert_equal(pool, plans, exchange="all_gather", **options):
    for plan in plans:
        validate_plan(plan)
    return assert_plans_equal_plain(pool, plans, exchange=exchange, **options)


@pytest.mark.parametrize(
    ("cp", "pp", "dp", "exchange"),
    sweep(
        [
            *((3, 1, 1, "ring"), (2, 2, 1, "all_gather"), (4, 1, 1, "all_gather")),
            *((4, 1, 1, "ring"), (2, 2, 1, "ring"), (3, 1, 1, "all_gather")),
        ],
        3,
    ),
)
def test_shared_packs_equal_plain_training(gloo_pool, cp, pp, dp, exchange):
    """Every sharding rule, random cuts that differ between forward and backward, any length, in a pipeline too."""
    plans = [context_plan(1000 * cp + 100 * pp + i, cp=cp, pp=pp, dp=dp, rule=rule) for i, rule in enumerate(RULES)]
    assert any(d.num_tokens < cp for plan in plans for d in plan.documents)
    assert any(s.start for plan in plans for p in plan.pack_plans for pack in p.forward for s in pack.slices)
    assert_equal(gloo_pool, plans, exchange)


@pytest.mark.parametrize(
    ("dp", "pp", "cp", "exchange"),
    sweep(
        [
            *((3, 1, 1, "all_gather"), (4, 1, 1, "all_gather"), (2, 1, 2, "ring"), (2, 2, 1, "ring")),
            *((4, 1, 1, "ring"), (2, 1, 2, "all_gather"), (2, 2, 1, "all_gather"), (3, 1, 1, "ring")),
        ],
        4,
    ),
)
def test_dp_merge_equals_plain_training(gloo_pool, dp, pp, cp, exchange):
    """Documents of all replicas, of blocks inside and of single replicas in one step."""
    rules = ["per_document", "owners", "dacp"]
    plans = [merged_plan(100 * dp + 10 * pp + i, dp=dp, pp=pp, cp=cp, rule=rules[i % len(rules)]) for i in range(3)]
    assert_equal(gloo_pool, plans, exchange)


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


def test_planned_packs_on_three_context_ranks_equal_plain_training(gloo_pool):
    """As planned, padded packs too. (Two ranks: test_matrix.)"""
    layout = even_layout(4, cp=3)
    names = ["padded", "slimpack", "skrull"]
    plans = [planned(name, layout) for name in names]
    plans += [
        planned("slimpack", layout, PlanOptions(max_pack_tokens=32, cp_sharding=rule))
        for rule in ("per_document", "per_sequence", "adaptive")
    ]
    assert shared_slices(plans)
    assert_plans_equal_plain(gloo_pool, plans)
    assert_plans_equal_plain(gloo_pool, sweep(plans[1::2], 1), exchange="ring")
