"""Seconds of packs with what transfers beside them take, against the account of the whole step."""

import numpy as np
import pytest

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import OverlapCost
from evenload.explore.timelines import overlapped_pack_times
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.types.document import Document
from evenload.types.layout import even_layout

BATCH = tuple(Document(doc_id=at, num_tokens=8 + 5 * at, num_label_tokens=7) for at in range(8))
KINDS = ("forward_s", "backward_s", "input_s", "weight_s")


def planned(strategy, beside, schedule="choose", **sizes):
    """(plan, its costs) over a link as slow as a backward."""
    costs = sample_coefficients(reduce_bandwidth_bytes_per_s=1e2, **beside)
    options = PlanOptions(max_pack_tokens=64, schedule=schedule)
    planner = StepPlanner(sample_model(num_layers=4), costs, even_layout(4, **sizes), None, options, host="unlimited")
    return planner.plan(0, BATCH, strategy), planner.costs


def added_seconds(plan, costs):
    """{(replica, stage): {kind: seconds on top of the plan's own}} and which packs they are."""
    found = {}
    for replica, (before, after) in enumerate(zip(plan.times, overlapped_pack_times(plan, costs), strict=True)):
        assert (after.p2p_forward_s, after.p2p_backward_s) == (before.p2p_forward_s, before.p2p_backward_s)
        for kind in KINDS:
            added = np.array(getattr(after, kind)) - np.array(getattr(before, kind))
            for pack, stage in np.argwhere(np.abs(added) > 1e-9).tolist() if added.size else ():
                found[replica, stage, kind, pack] = added[pack, stage]
    return found


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}, {"pp": 2}])
@pytest.mark.parametrize("strategy", ["slimpack", "balanced"])
def test_with_nothing_beside_them_packs_take_what_was_planned(strategy, sizes):
    assert added_seconds(*planned(strategy, {}, **sizes)) == {}


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "pp": 2}])
def test_the_last_backward_of_a_rank_has_what_sums_take(sizes):
    """Compute at seven tenths beside a sum: one backward of a rank is longer, where its replica is not done before."""
    plan, costs = planned("balanced", {"overlap": OverlapCost(compute_slowdown=0.3), "overlap_gather": False}, **sizes)
    added = added_seconds(plan, costs)
    assert {stage for _, stage, *_ in added} == set(range(plan.layout.num_stages))
    for (replica, stage, kind, pack), seconds in added.items():
        actions = [one for one in plan.schedules[replica].ranks[stage] if one.kind != "F"]
        assert (kind, pack) == ("backward_s", actions[-1].pack)
        assert 0 < seconds <= 0.3 / 0.7 * plan.times[replica].backward_s[pack][stage] + 1e-9


def test_the_first_forward_has_what_gathers_of_weights_take():
    plan, costs = planned("balanced", {"overlap": OverlapCost(compute_slowdown=0.3), "overlap_reduction": False}, dp=2)
    added = added_seconds(plan, costs)
    assert {(kind, pack) for _, _, kind, pack in added} == {
        ("forward_s", replica.ranks[0][0].pack) for replica in plan.schedules
    }
    assert min(added.values()) > 0
