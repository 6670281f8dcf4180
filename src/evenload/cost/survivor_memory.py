"""Shared memory in which ranks keep their last steps for survivors (`train.survivor_memory`)."""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import optimizer_bytes_per_parameter, trained_parameters_per_rank
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

_STEPS = 2
"""The last finished one, and that which is being written over the one before."""


def survivor_bytes(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Of one rank by pipeline rank, int64[R]: two copies of its shard of optimizer state and of the weights, which
    are the masters where there are some."""
    per_parameter = optimizer_bytes_per_parameter(model)
    if model.bytes_per_element >= 4:
        per_parameter += model.bytes_per_element
    shard = -(-trained_parameters_per_rank(model, layout) // np.array(layout.data_sizes))
    return _STEPS * per_parameter * shard


def survivor_bytes_of_all(model: ModelSpec, layout: ParallelLayout) -> int:
    """Of all ranks of a layout."""
    return int(survivor_bytes(model, layout).sum()) * layout.dp * layout.cp * layout.tp
