"""Costs under which attention is expensive."""

from evenload.cost.coefficients import CostCoefficients, PassCoefficients
from evenload.types.cluster import LinkSpec

STEEP_COSTS = CostCoefficients(
    source="analytic",
    device="test",
    peak_flops_per_s=1e9,
    forward=PassCoefficients(linear_s_per_token=1e-3, attention_s_per_pair=1e-4, slice_s=1e-5, pack_s=2e-2),
    backward=PassCoefficients(linear_s_per_token=2e-3, attention_s_per_pair=2.5e-4, slice_s=2e-5, pack_s=4e-2),
    head_s_per_token=5e-4,
    p2p_bandwidth_bytes_per_s=1e9,
    p2p_latency_s=1e-5,
    reduce_bandwidth_bytes_per_s=1e9,
    reduce_latency_s=1e-5,
    intra_node=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-6),
    host_link=LinkSpec(bandwidth_bytes_per_s=1e9, latency_s=0.0),
    devices_per_node=64,
)
"""Balanced cuts differ between forward and backward, and transfers are cheap enough to share documents."""
