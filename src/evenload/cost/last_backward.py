"""When, inside the last backward of a stage, the gradients of each of its units are complete.

A backward runs the head, then the layers downwards, then the embedding, and each takes what its coefficients say of the
pack. Waiting for other ranks and what is computed again are not told apart: they are spread like the rest.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import PassCoefficients
from evenload.cost.pack_cost import PackCosts
from evenload.cost.slice_features import pairs_column, prefix_column
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction


def pack_features(costs: PackCosts, packs: Sequence[tuple[SliceColumns, int]]) -> NDArray[np.float64]:
    """Of packs by their columns and number, as `cost.slice_features` has them; float64[n, features]."""
    parts = [columns.pack_range(pack, pack + 1) for columns, pack in packs]
    return costs.features.of_packs(SliceColumns.concat(parts, [0] * len(parts)))


def stage_units(costs: PackCosts, stage: int) -> list[int]:
    """Numbers of a stage's units (`cost.memory.trained_unit_parameters`), in the order in which a backward completes
    them."""
    first, last = costs.layout.stage_layers[stage]
    head = [1 + costs.model.num_layers] if stage == costs.layout.num_stages - 1 else []
    return [*head, *(1 + layer for layer in reversed(range(first, last))), *([0] if stage == 0 else [])]


def shares_left(costs: PackCosts, features: NDArray[np.float64], stage: int) -> NDArray[np.float64]:
    """Of every pack and unit (`stage_units`) the share of the backward's seconds that is left when the unit's gradients
    are complete; float64[n, units].

    Args:
        features: of the packs.
    """
    seconds = unit_seconds(costs, features, stage_units(costs, stage), "backward")
    total_s = seconds.sum(axis=1, keepdims=True)
    left_s = total_s - np.cumsum(seconds, axis=1)
    return np.maximum(0.0, np.divide(left_s, total_s, out=np.zeros_like(left_s), where=total_s > 0))


def unit_seconds(
    costs: PackCosts, features: NDArray[np.float64], units: Sequence[int], direction: Direction
) -> NDArray[np.float64]:
    """Of every pack on every unit, without transfers; float64[n, units]. The head counts as backward."""
    coefficients, tp = costs.coefficients, costs.layout.tp
    layer: PassCoefficients = getattr(coefficients, direction)
    rates = np.zeros((features.shape[1], len(units)))
    for at, unit in enumerate(units):
        if unit == 0:
            rates[0, at] = coefficients.embedding_s_per_token / tp
        elif unit == 1 + costs.model.num_layers:
            rates[0, at], rates[2, at] = coefficients.head_s_per_token / tp, coefficients.head_pack_s
        else:
            window = costs.windows.index(costs.model.windows[unit - 1])
            rates[:3, at] = layer.linear_s_per_token / tp, layer.slice_s, layer.pack_s
            rates[pairs_column(window), at] = layer.attention_s_per_pair / tp
            rates[prefix_column(window), at] = layer.prefix_s_per_token / tp
    return features @ rates
