"""What `plan.sharing.cp_sharding` must know to choose by predicted seconds, from the cost model of a layout.

A rank keeps its rows from forward to backward, so one choice serves both: seconds are those of forward and backward
together, on each direction's slowest stage.
"""

from dataclasses import dataclass

from evenload.cost.group_comm import context_traffic, ring_home
from evenload.cost.pack_cost import PackCosts
from evenload.types.micropack import Direction
from evenload.types.work import WorkCurve

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class ShardingCost:
    """What sharing a pack costs a group of ranks.

    Args:
        work: seconds of a token range on one stage.
        tile: query rows of one attention block.
        gather_s_per_token: transfer of one token's keys and values to all ranks of the group.
        place_s_per_token: copying them into place, which nothing hides.
        hidden_share: of the attention that runs meanwhile, behind which transfers hide.
        is_ring: keys and values travel round the ranks, with those of the slice's prefix.
        prefix_s: (seconds a token, window in tokens) of what a range sees before itself, on top of its pairs; window
            0 = all. Documents cut into more ranges pay it more often.
    """

    work: WorkCurve
    tile: int = 1
    gather_s_per_token: float = 0.0
    place_s_per_token: float = 0.0
    hidden_share: float = 0.8
    is_ring: bool = False
    prefix_s: tuple[tuple[float, int], ...] = ()


def sharding_cost(costs: PackCosts, ranks: int) -> ShardingCost:
    """Of a group of `ranks` ranks that share a pack: the layout's context ranks, times the replicas of a group."""
    layout, coefficients = costs.layout, costs.coefficients
    # `forward_work` is of one of the layout's context ranks; pieces are priced whole.
    curves = (costs.forward_work(), costs.backward_work())
    link = coefficients.group_link(ranks, stride=layout.tp)
    # As if no document were cut: what travels is alike under all rules but for what stays whole.
    traffic = [context_traffic(costs.model, coefficients, layout.tp, way, is_cut=False) for way in _DIRECTIONS]
    home_bytes = sum(ring_home(costs.model, coefficients, layout.tp, direction)[0] for direction in _DIRECTIONS)
    moved_bytes = (sum(one.token_bytes for one in traffic) * (ranks - 1) + home_bytes) / ranks
    most_layers = int(costs.layers().max())
    return ShardingCost(
        work=WorkCurve(
            linear_s=sum(curve.linear_s for curve in curves) * layout.cp,
            attention_s=tuple(
                (coefficient * layout.cp, window) for curve in curves for coefficient, window in curve.attention_s
            ),
            slice_s=sum(curve.slice_s for curve in curves),
        ),
        prefix_s=tuple(term for direction in _DIRECTIONS for term in costs.prefix_seconds(direction)),
        tile=coefficients.attention_tile,
        gather_s_per_token=most_layers * moved_bytes / link.bandwidth_bytes_per_s,
        place_s_per_token=most_layers * sum(one.placed_bytes for one in traffic) * coefficients.copy_s_per_byte,
        hidden_share=coefficients.context_hidden_share,
        is_ring=coefficients.context_exchange == "ring",
    )
