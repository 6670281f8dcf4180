"""`RankSpeeds`: how much slower than its cost coefficients say every rank of a layout computes."""

import math

from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.replica_block import ReplicaBlock


class RankSpeeds(Frozen):
    """Factors on the seconds of packs; transfers between ranks keep theirs.

    Args:
        slowness: per replica, per pipeline rank, relative to `drift`: 1.3 = packs take 30 % longer than elsewhere.
            Ranks of one tensor- or context-parallel group compute the same packs together and have one factor.
        drift: common to all ranks.

    Raises:
        ConfigError: rows of unequal lengths, or a factor that is not above 0 and finite.
    """

    slowness: tuple[tuple[float, ...], ...]
    drift: float = 1.0

    def __post_init__(self) -> None:
        if not self.slowness or not self.slowness[0] or len({len(row) for row in self.slowness}) > 1:
            raise ConfigError(f"rank speeds: slowness {self.slowness} must have one row of equal length a replica")
        for value in (self.drift, *(one for row in self.slowness for one in row)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"rank speeds: a factor is {value}, must be above 0 and finite")

    def factors(self, dp_rank: int) -> tuple[float, ...]:
        """Of the pipeline ranks of one replica: seconds of its packs over those that the coefficients give."""
        return tuple(self.drift * one for one in self.slowness[dp_rank])

    def block_factors(self, block: ReplicaBlock) -> tuple[float, ...]:
        """Of packs that several replicas share: every pipeline rank waits for the slowest member."""
        return tuple(map(max, zip(*(self.factors(dp_rank) for dp_rank in block.replicas), strict=True)))

    def least_factor(self) -> float:
        """Of the fastest rank."""
        return min(min(self.factors(dp_rank)) for dp_rank in range(len(self.slowness)))

    def describe(self) -> str:
        """Factors of all ranks, replicas parted by "/": `1.00,1.31/1.00,1.00`."""
        return "/".join(
            ",".join(f"{one:.2f}" for one in self.factors(dp_rank)) for dp_rank in range(len(self.slowness))
        )
