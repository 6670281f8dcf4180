"""`skrull` trains like plain training, with context ranks and without."""

import pytest

from dist_equality import assert_plans_equal_plain
from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.plan.options import PlanOptions
from evenload.plan.planner import StepPlanner
from evenload.plan.validate import validate_plan
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.model import model_from_hf_config
from reference_training import tiny_config

LENGTHS = [64, 1, 9, 30, 1, 17, 5, 2, 41, 12, 1, 25]
COSTS = CostCoefficients(
    source="analytic",
    device="test",
    peak_flops_per_s=1e9,
    forward=PassCoefficients(linear_s_per_token=1e-3, attention_s_per_pair=1e-4, pack_s=1e-4),
    backward=PassCoefficients(linear_s_per_token=2e-3, attention_s_per_pair=2.5e-4, pack_s=2e-4),
    p2p_bandwidth_bytes_per_s=1e9,
    p2p_latency_s=1e-5,
    reduce_bandwidth_bytes_per_s=1e9,
    reduce_latency_s=1e-5,
    intra_node=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-3),
    devices_per_node=8,
)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_skrull_equals_plain_training(gloo_pool, dp, cp):
    """float64: loss, every gradient and the gradient norm to 1e-10."""
    model = model_from_hf_config(tiny_config("llama").to_dict(), "llama", 8)
    planner = StepPlanner(
        model, COSTS, even_layout(model.num_layers, dp=dp, cp=cp), None, PlanOptions(max_pack_tokens=64)
    )
    step = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(LENGTHS))
    plan = planner.plan(0, step, "skrull")
    validate_plan(plan, max_pack_tokens=64)
    assert max(len(packs.forward) for packs in plan.pack_plans) > 1
    kinds = {piece.cp for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices}
    assert kinds == {1, cp}, "some documents are shared, some whole on one rank"
    assert_plans_equal_plain(gloo_pool, [plan])
