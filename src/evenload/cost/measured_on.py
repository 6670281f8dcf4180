"""What the coefficients of a cost file were measured on: the model, the layout, and packs to time again later."""

from typing import Literal

from evenload.errors import ConfigError
from evenload.types.base import Frozen
from evenload.types.model import ModelSpec


class MeasuredPack(Frozen):
    """A pack that was timed, to be timed again later: the difference is the machine's (`calibrate.yardstick`).

    Args:
        slices: (document, start, stop).
        seconds: of one layer, medians of repeats, the mean of all ranks.
    """

    direction: Literal["forward", "backward"]
    slices: tuple[tuple[int, int, int], ...]
    seconds: float


class MeasuredOn(Frozen):
    """What measured coefficients were measured on.

    Args:
        model: whose layers were timed, in the precision that they computed in.
        dp, cp, pp, tp: sizes of the layout that ran; links between more devices than those are not known.
        packs: a few that were timed, cheapest first; cost files of older versions hold none.
    """

    model: ModelSpec
    dp: int
    cp: int
    pp: int
    tp: int
    packs: tuple[MeasuredPack, ...] = ()

    def __post_init__(self) -> None:
        for field in ("dp", "cp", "pp", "tp"):
            if getattr(self, field) < 1:
                raise ConfigError(f"measured_on: {field} is {getattr(self, field)}, must be at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.pp * self.tp
