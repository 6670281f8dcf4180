"""When, inside the first forward of a stage, the weights of each of its units are read: embedding, then layers upwards.

As `cost.last_backward` for the other end of a step; waiting for other ranks is not told apart here either.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.last_backward import unit_seconds
from evenload.cost.pack_cost import PackCosts


def forward_units(costs: PackCosts, stage: int) -> list[int]:
    """Numbers of a stage's units (`cost.memory.trained_unit_parameters`), in the order in which a forward reads them;
    the head is read by the backward."""
    first, last = costs.layout.stage_layers[stage]
    return [*([0] if stage == 0 else []), *(1 + layer for layer in range(first, last))]


def shares_before(costs: PackCosts, features: NDArray[np.float64], stage: int) -> NDArray[np.float64]:
    """Of every pack and unit (`forward_units`) the share of the forward's seconds that is over when the unit's weights
    are read; float64[n, units].

    Args:
        features: of the packs (`cost.last_backward.pack_features`).
    """
    seconds = unit_seconds(costs, features, forward_units(costs, stage), "forward")
    total_s = seconds.sum(axis=1, keepdims=True)
    before_s = np.cumsum(seconds, axis=1) - seconds
    return np.divide(before_s, total_s, out=np.zeros_like(before_s), where=total_s > 0)
