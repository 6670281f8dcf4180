"""Every strategy in one pipeline, to the byte of its detailed timeline; ranks without labels or documents."""

import msgspec
import pytest

from cost_samples import documents
from dist_equality import assert_plans_equal_plain
from dist_training import STEEP_COSTS
from evenload.cost.pack_cost import PackCosts
from evenload.data.hub import model_from_config
from evenload.explore.timelines import detailed_timeline
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.slimpack import SlimpackOptions
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout
from evenload.types.timeline import MEMORY_KINDS
from reference_training import tiny_config

STRATEGIES = ["padded", "best_fit", "balanced", "slimpack", "auto", "sequential", "fixed_greedy", "fixed_exact", "wlb"]
LIMIT = 64
# Documents of one token; one far above the mean, which slimpack slices; many short ones.
LENGTHS = [64, 1, 9, 30, 1, 17, 5, 2, 41, 12, 1, 25]

MODEL = model_from_config(tiny_config("llama").to_dict(), "llama", 8)
# Documents cannot be shared by ranks, whose link they would need.
COSTS = msgspec.structs.replace(STEEP_COSTS, intra_node=None, host_link=None, devices_per_node=1)


def planned(strategy, lengths, options=None, costs=COSTS):
    """On two replicas of two stages."""
    layout = even_layout(MODEL.num_layers, dp=2, pp=2)
    planner = StepPlanner(MODEL, costs, layout, None, options or PlanOptions(max_pack_tokens=LIMIT), host="unlimited")
    step = documents(lengths)
    plan = planner.plan(0, step, strategy)
    validate_plan(plan, max_pack_tokens=planner.options.max_pack_tokens)
    return plan


def test_every_strategy_equals_plain_training_and_its_detailed_timeline(gloo_pool):
    """float64, Llama with GQA: loss, every gradient and the gradient norm to 1e-10."""
    plans = [planned(strategy, LENGTHS) for strategy in STRATEGIES]
    assert any(p.pad_to for p in plans[0].pack_plans[0].forward), "padded really pads"
    sliced = []
    for cuts in ("asymmetric", "symmetric"):
        for schedule in ("static", "list"):
            options = PlanOptions(max_pack_tokens=16, schedule=schedule, strategies=(SlimpackOptions(cuts=cuts),))
            sliced.append(planned("slimpack", LENGTHS, options))
    slices = [len(pack.slices) for pack in sliced[-1].pack_plans[0].forward]
    assert any(s.start for p in sliced[0].pack_plans for pack in p.forward for s in pack.slices), "documents are sliced"
    assert slices
    plans += sliced
    for plan, measured in zip(plans, assert_plans_equal_plain(gloo_pool, plans), strict=True):
        assert_peaks_match_the_memory_model(plan, measured)


def assert_peaks_match_the_memory_model(plan, measured):
    """The simulator's bytes without temporaries are the store's: at the peak, after every action, and of every kind."""
    timeline = detailed_timeline(plan, PackCosts(MODEL, COSTS, plan.layout))
    for dp_rank in range(plan.layout.dp):
        for pp_rank in range(plan.layout.pp):
            stored = measured[plan.layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank)]
            own = (timeline.memory_dp_rank == dp_rank) & (timeline.memory_rank == pp_rank)
            held = timeline.memory_kind_bytes[own]
            predicted = {name: held[:, MEMORY_KINDS.index(name)] for name in STORE_KINDS}
            total = sum(predicted.values())
            # A rank's samples: the start of the step, then the start and the end of every action.
            assert total[2::2].tolist() == stored.after_actions
            assert total.max() == stored.peak
            assert {name: int(column.max()) for name, column in predicted.items()} == stored.peak_by_kind


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 1, 40], [50]], ids=["no labels", "one rank without", "one"])
def test_ranks_without_labels_or_documents(gloo_pool, lengths):
    """0/0 on one rank is NaN everywhere after the reduction (notes: users row 19); a replica may have nothing to do."""
    plans = [planned(strategy, lengths) for strategy in ("padded", "sequential", "slimpack", "wlb")]
    assert_plans_equal_plain(gloo_pool, plans)


def test_what_runs_ahead_of_shared_packs_equals_plain_training(gloo_pool):
    """Own forwards stand before the last backwards that replicas share."""
    costs = msgspec.structs.replace(STEEP_COSTS, host_link=None)
    options = PlanOptions(max_pack_tokens=64, dp_merge=True)
    plan = planned("auto", [64, 64, 64, *[6] * 12], options, costs)
    row = plan.schedules[0].ranks[0]
    alone = {pack.index for pack in plan.pack_plans[0].forward if pack.slices[0].cp == 1}
    shared = {pack.index for pack in plan.pack_plans[0].backward if pack.slices[0].cp > 1}
    assert alone
    assert shared
    first_own = next(at for at, action in enumerate(row) if action.kind == "F" and action.pack in alone)
    last_shared = max(at for at, action in enumerate(row) if action.kind != "F" and action.pack in shared)
    assert first_own < last_shared
    assert_plans_equal_plain(gloo_pool, [plan])
