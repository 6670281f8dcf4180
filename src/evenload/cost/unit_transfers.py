"""Seconds in which one unit's gradients are summed over the ranks that hold it, and its updated weights gathered.

A unit's parameters lie in a few buffers, each a transfer of its own (`runtime.optim.parameter_units`): what takes
weight decay apart from what does not, what a tensor-parallel rank holds a part of apart from what it holds whole, and a
tied embedding apart from everything. So a unit pays its bytes once and the latency of a ring once a buffer.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.memory import trained_unit_parameters
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


class UnitTransfers(NamedTuple):
    """Of one pipeline rank's units, from the start of the model to its end.

    Args:
        unit: int64[n], as `cost.memory.trained_unit_parameters` numbers them.
        parameters: int64[n]; sum_s, gather_s: float64[n], alone, with nothing beside them.
    """

    unit: NDArray[np.int64]
    parameters: NDArray[np.int64]
    sum_s: NDArray[np.float64]
    gather_s: NDArray[np.float64]


def unit_transfers(
    model: ModelSpec, coefficients: CostCoefficients, layout: ParallelLayout, rank: int
) -> UnitTransfers:
    """Raises `ConfigError` where several ranks hold the units and no link between them is known."""
    parameters, buffers = trained_unit_parameters(model, layout, rank), unit_buffers(model, layout, rank)
    units, copies, element = sorted(parameters), layout.data_sizes[rank], model.bytes_per_element
    sums, gathers = (
        [coefficients.ring_seconds(size * parameters[unit], copies, buffers[unit], way) for unit in units]
        for size, way in ((max(element, 4), "sum"), (element, "gather"))
    )
    held = np.array([parameters[unit] for unit in units], np.int64)
    return UnitTransfers(np.array(units, np.int64), held, np.array(sums, np.float64), np.array(gathers, np.float64))


def unit_buffers(model: ModelSpec, layout: ParallelLayout, rank: int) -> dict[int, int]:
    """Buffers of a pipeline rank's units. Biases of models whose biases are not counted are not either."""
    is_cut, stages, last = layout.tp > 1, layout.stages_of_rank(rank), layout.num_stages - 1
    layers = [layer for stage in stages for layer in range(*layout.stage_layers[stage])]
    if model.adapter_parameters_per_layer:
        return dict.fromkeys((1 + layer for layer in layers), 2 if is_cut else 1)
    whole = is_cut * ((model.num_experts > 0) + model.biases)
    found = dict.fromkeys((1 + layer for layer in layers), 2 + whole)
    if 0 in stages:
        found[0] = 1 + (model.position_rows > 0 and (model.tied_embeddings or is_cut))
    if last in stages:
        found[1 + model.num_layers] = 1 + (not (model.tied_embeddings and 0 in stages))
    return found
