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
        shares_packs: replicas wait for each other inside of packs, where sums may make a circle (docs/decisions/03).
        coefficients: without `reduction_beside` nothing is summed, without `gather_beside` nothing gathered beside
            packs; `cli.worker_setup.run_coefficients` measures both.
        goes_on: another step follows.
    """
    sums, gathers = coefficients.reduction_beside, coefficients.gather_beside
    return Overlaps(
        sums=config.train.overlap_reduction and sums is not None and sums.pays and not shares_packs,
        gathers=config.train.overlap_gather and gathers is not None and gathers.pays and goes_on,
    )
