"""What the coefficients of a cost file were measured on: the model, the layout, and how busy the machine was
meanwhile."""

from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.model import ModelSpec

# Above these, predicted seconds are off by more than what plans decide by. A quiet machine stays far below.
_MOST_WAITED_SHARE = 0.15
_MOST_SPREAD = 0.5


class Disturbance(Frozen):
    """How busy something else kept the machine while it was timed; of several ranks, the most that any had.

    Args:
        waited_share: of the time, in which its busiest thread stood ready and had no core, beyond what the run's own
            processes take from each other.
        spread: by how much the mean of repeated timings is above the fastest, over all packs together.
    """

    waited_share: float
    spread: float

    @property
    def is_noisy(self) -> bool:
        """Too much for what was timed to be believed."""
        return self.size > 1

    @property
    def size(self) -> float:
        """To tell the quieter of two measurements."""
        return max(self.waited_share / _MOST_WAITED_SHARE, self.spread / _MOST_SPREAD)

    def describe(self) -> str:
        return (
            f"processes stood without a core for {self.waited_share:.0%} of the time, and repeated timings were "
            f"{self.spread:.0%} above the fastest"
        )


class MeasuredOn(Frozen):
    """What measured coefficients were measured on.

    Args:
        model: whose layers were timed, in the precision that they computed in.
        dp, cp, pp, tp: sizes of the layout that ran; links between more devices than those are not known.
        disturbance: of the machine meanwhile; None = not known (cost files of older versions).
    """

    model: ModelSpec
    dp: int
    cp: int
    pp: int
    tp: int
    disturbance: Disturbance | None = None

    def __post_init__(self) -> None:
        for field in ("dp", "cp", "pp", "tp"):
            if getattr(self, field) < 1:
                raise ConfigError(f"measured_on: {field} is {getattr(self, field)}, must be at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.pp * self.tp
