"""Small planners whose layout may change: links of 1 MB/s, four devices of eight a node, batches by hand."""

from cost_samples import sample_coefficients, sample_model
from evenload.planning.layouts.flex_planner import FlexPlanner
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.flexpipe import FlexOptions
from evenload.types.cluster import LinkSpec
from evenload.types.layout import even_layout

SHORT, MIDDLE, LONG = [20] * 16, [100] * 8, [300, 200]
PUBLISHED = {"margin": 0.0, "patience_steps": 1}
ROOM, TIGHT, NARROW = 200_000, 300_000, 240_000
"""For short batches at any depth; for long ones with a memory plan at dp=4; for long ones only in a pipeline."""


def make(dp: int, pp: int, cap: int | None, bytes_per_s: float = 1e6, *, num_layers: int = 4, **options) -> FlexPlanner:
    link = LinkSpec(bandwidth_bytes_per_s=bytes_per_s, latency_s=0.0)
    coefficients = sample_coefficients(
        intra_node=link,
        inter_node=link,
        devices_per_node=8,
        host_link=LinkSpec(bandwidth_bytes_per_s=1e6, latency_s=0.0),
        reduce_bandwidth_bytes_per_s=1e6,
        reduce_latency_s=0.0,
        p2p_bandwidth_bytes_per_s=1e6,
        p2p_latency_s=0.0,
    )
    planner = StepPlanner(
        sample_model(num_layers=num_layers),
        coefficients,
        even_layout(num_layers, dp=dp, pp=pp),
        cap,
        PlanOptions(max_pack_tokens=1000, policy="choose", candidates=3),
        host="unlimited",
    )
    return FlexPlanner(
        planner, lambda _: coefficients, FlexOptions(**{"known_steps": 1, "part_pipelines": False} | options)
    )
