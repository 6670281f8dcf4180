"""`SpeedCosts`: the costs of every replica, and of every block of replicas, at the speeds of their ranks.

Replicas whose ranks have equal factors share one `PackCosts`, so prices are made once for them.
"""

from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.types.rank_speeds import RankSpeeds
from evenload.types.replica_block import ReplicaBlock


class SpeedCosts:
    """Costs by replica.

    Args:
        costs: as the coefficients say.

    Raises:
        ConfigError: speeds of another layout.
    """

    def __init__(self, costs: PackCosts, speeds: RankSpeeds) -> None:
        layout, slowness = costs.layout, speeds.slowness
        if (len(slowness), len(slowness[0])) != (layout.dp, layout.pp):
            raise ConfigError(
                f"rank speeds are of {len(slowness)} replicas of {len(slowness[0])} pipeline ranks, "
                f"the layout is {layout.describe()}"
            )
        self.speeds = speeds
        self._costs = costs
        self._made: dict[tuple[float, ...], PackCosts] = {}

    def of_replica(self, dp_rank: int) -> PackCosts:
        """Of packs that a replica runs alone."""
        return self._at(self.speeds.factors(dp_rank))

    def of_block(self, block: ReplicaBlock) -> PackCosts:
        """Of packs that replicas share: every rank waits for the slowest of them."""
        return self._at(self.speeds.block_factors(block))

    def _at(self, factors: tuple[float, ...]) -> PackCosts:
        if factors not in self._made:
            costs = self._costs
            self._made[factors] = PackCosts(
                costs.model,
                costs.coefficients,
                costs.layout,
                keeps_short_whole=costs.keeps_short_whole,
                slowness=factors,
            )
        return self._made[factors]
