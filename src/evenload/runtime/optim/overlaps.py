"""Which transfers of a step run beside what is computed: as configured, where the costs say that it pays.

The simulator decides by the same rules (`simulate.step_end`, `simulate.step_start`).
"""

from typing import NamedTuple

from evenload.cost.coefficients import CostCoefficients
from evenload.runtime.config.train_config import TrainConfig


class Overlaps(NamedTuple):
    """Of one step: sums of gradients beside its packs, and gathers of its updated weights beside those of the next."""

    sums: bool
    gathers: bool


def overlaps_of(config: TrainConfig, coefficients: CostCoefficients, *, shares_packs: bool, goes_on: bool) -> Overlaps:
    """The same on all ranks.

    Args:
        shares_packs: replicas wait for each other inside of packs, where sums may make a circle (decision 36).
        coefficients: without `overlap` nothing is reduced or gathered beside packs;
            `cli.worker_setup.run_coefficients` measures it.
        goes_on: another step follows.
    """
    sums, gathers = coefficients.reduction_overlap is not None, coefficients.gather_overlap is not None
    return Overlaps(
        sums=config.train.overlap_reduction and sums and not shares_packs,
        gathers=config.train.overlap_gather and gathers and goes_on,
    )
