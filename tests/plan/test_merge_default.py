import pytest

from cost_samples import sample_coefficients
from evenload.plan.problem import PlanOptions
from evenload.plan.strategies.registry import decide_dp_merge
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

LINK = LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=1e-4)
KNOWN = sample_coefficients(intra_node=LINK, devices_per_node=8)


@pytest.mark.parametrize("strategy", ["slimpack", "auto"])
@pytest.mark.parametrize("dp", [2, 3, 4, 6])
def test_on_where_replicas_can_share_and_nobody_said_otherwise(strategy, dp) -> None:
    layout = even_layout(3, dp=dp)
    options, said = decide_dp_merge(PlanOptions(max_pack_tokens=7), strategy, layout, KNOWN)
    assert options == PlanOptions(max_pack_tokens=7, dp_merge=True)
    assert "replicas share" in said
    kept, said = decide_dp_merge(PlanOptions(dp_merge=False), strategy, layout, KNOWN)
    assert kept.dp_merge is False
    assert "one replica (plan.options.dp_merge)" in said


def test_off_with_its_reason_where_nothing_can_be_shared() -> None:
    """A default must not refuse runs that went before: costs of one replica know no link."""
    unknown, said = decide_dp_merge(PlanOptions(), "slimpack", even_layout(3, dp=2), sample_coefficients())
    assert unknown.dp_merge is False
    assert "know no link" in said


def test_strategies_that_never_share_and_single_replicas_are_left_alone() -> None:
    """`require_trainable` refuses the option where it would do nothing."""
    assert decide_dp_merge(PlanOptions(), "balanced", even_layout(3, dp=2), KNOWN) == (PlanOptions(), "")
    assert decide_dp_merge(PlanOptions(), "slimpack", even_layout(3), KNOWN) == (PlanOptions(), "")
