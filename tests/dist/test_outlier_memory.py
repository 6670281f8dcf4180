"""A document of twenty times the mean that replicas share: plain training's gradients, and the planned bytes."""

import msgspec
import numpy as np
import pytest

from cost_samples import documents
from dist_equality import assert_plans_equal_plain
from dist_training import COSTS
from evenload.data.hub import model_from_config
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.runtime.replay.held_bytes import STORE_KINDS
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout
from evenload.types.plan import StepPlan
from reference_training import tiny_config
from varied_plans import predicted_kind_bytes

# 39 documents of 2 to 8 tokens and one of twenty times the mean of the forty.
SHORT = [2 + 5 * i % 7 for i in range(39)]
LENGTHS = [*SHORT[:17], sum(SHORT), *SHORT[17:]]
POLICIES = ("replay", "recompute", "offload")
MODEL = model_from_config(tiny_config("llama").to_dict(), "llama", 8)
# Constants small enough that what documents cost decides.
CHEAP = {"slice_s": 1e-5, "pack_s": 3e-5}
PASSES = {name: msgspec.structs.replace(getattr(COSTS, name), **CHEAP) for name in ("forward", "backward")}


def outlier_plan(policy: str, dp: int, pp: int) -> StepPlan:
    assert LENGTHS[17] * len(LENGTHS) == 20 * sum(LENGTHS)
    planner = StepPlanner(
        MODEL,
        msgspec.structs.replace(COSTS, **PASSES),
        even_layout(4, dp=dp, pp=pp),
        None,
        PlanOptions(max_pack_tokens=256, policy=policy, cp_sharding="per_document", dp_merge=True),
        host="unlimited",  # type: ignore[arg-type]
    )
    step = documents(LENGTHS)
    plan = planner.plan(0, step, "slimpack")
    validate_plan(plan, max_pack_tokens=256)
    for packs in plan.pack_plans:
        ranks = {s.cp for pack in packs.forward for s in pack.slices if s.doc_id == 17}
        assert ranks == {dp}, f"replica {packs.dp_rank} has its share of the outlier"
    return plan


@pytest.mark.parametrize(("dp", "pp", "tolerance"), [(2, 1, 0.0), (2, 2, 0.1)])
def test_a_shared_outlier_trains_and_takes_the_planned_bytes(gloo_pool, dp, pp, tolerance):
    """To the byte where the outlier is not cut; where it is, rows are freed by the cell, which may have a row more."""
    plans = [outlier_plan(policy, dp, pp) for policy in POLICIES]
    is_cut = any(s.start for plan in plans for packs in plan.pack_plans for pack in packs.forward for s in pack.slices)
    assert is_cut == (tolerance > 0), "another cut: choose costs that leave the outlier whole"
    measured = assert_plans_equal_plain(gloo_pool, plans)
    peaks: dict[str, list[int]] = {}
    predicted_peaks: dict[str, list[int]] = {}
    for policy, plan, ranks in zip(POLICIES, plans, measured, strict=True):
        for dp_rank in range(dp):
            for pp_rank, predicted in enumerate(predicted_kind_bytes(plan, MODEL, dp_rank)):
                stored = ranks[plan.layout.global_rank(pp_rank=pp_rank, dp_rank=dp_rank)]
                for name, column in stored.after_kinds.items():
                    expected = predicted[name]["after"]
                    if not is_cut:
                        assert column == expected, (policy, dp_rank, name)
                    assert max(column) == pytest.approx(max(expected), rel=tolerance), (policy, dp_rank, pp_rank, name)
                total = np.sum([predicted[name]["running"] + predicted[name]["after"] for name in STORE_KINDS], axis=0)
                peaks.setdefault(policy, []).append(stored.peak)
                predicted_peaks.setdefault(policy, []).append(int(total.max()))
    for policy in POLICIES:
        # A forward's final hidden states come after its offloaded layers have left, so its peak may be lower.
        most = 1.25 if policy == "offload" else 1 + tolerance
        for held, expected in zip(peaks[policy], predicted_peaks[policy], strict=True):
            assert held / (1 + tolerance) <= expected <= held * most, policy
        if policy != "replay":
            assert all(less < 0.6 * most for less, most in zip(peaks[policy], peaks["replay"], strict=True))
