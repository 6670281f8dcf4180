"""Forwards and backwards before each of whose units the ranks gather its weights (FSDP2, ZeRO-3).

    gather   0 | 1   | 2     | 3
    compute    | 0     | 1   | 2    | 3

The gather of the next unit runs beside the compute of this one; the first of a pass nobody hides. What both cost each
other says `CostCoefficients.gather_beside`, as for Evenload's own gathers; without it they run one after the other.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import BesideCompute
from evenload.cost.first_forward import forward_units
from evenload.cost.last_backward import pack_features, stage_units, unit_seconds
from evenload.cost.pack_cost import PackCosts
from evenload.cost.unit_transfers import unit_transfers
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction
from evenload.types.pipeline import PipelineTasks


def with_pass_gathers(costs: PackCosts, columns: SliceColumns, tasks: PipelineTasks) -> PipelineTasks:
    """The same packs of one stage with the gathers of weights in their seconds."""
    if not columns.num_packs:
        return tasks
    features = pack_features(costs, [(columns, pack) for pack in range(columns.num_packs)])
    transfers = unit_transfers(costs.model, costs.coefficients, costs.layout, 0)
    gather_s = dict(zip(transfers.unit.tolist(), transfers.gather_s.tolist(), strict=True))
    beside = costs.coefficients.gather_beside

    def seconds(direction: Direction, units: list[int], pack_s: NDArray[np.float64]) -> NDArray[np.float64]:
        unit_s = unit_seconds(costs, features, units, direction)
        total_s = unit_s.sum(axis=1)
        # Halves, host and policies are in the pack's seconds and not in its units'.
        unit_s *= np.divide(pack_s, total_s, out=np.ones_like(pack_s), where=total_s > 0)[:, None]
        gathers_s = [gather_s.get(unit, 0.0) for unit in units]
        found = np.full(len(pack_s), gathers_s[0])
        for at, next_s in enumerate([*gathers_s[1:], 0.0]):
            found += beside_seconds(unit_s[:, at], next_s, beside)
        return found

    forward_s = seconds("forward", forward_units(costs, 0), tasks.forward_s[:, 0])
    backward_s = seconds("backward", stage_units(costs, 0), tasks.backward_s[:, 0])
    return replace(tasks, forward_s=forward_s[:, None], backward_s=backward_s[:, None])


def beside_seconds(
    compute_s: NDArray[np.float64], transfer_s: float, beside: BesideCompute | None
) -> NDArray[np.float64]:
    """Of compute and a transfer that begin together, until both have ended; float64[n].

    Args:
        compute_s: float64[n], alone; transfer_s: alone.
        beside: what they cost each other; None, or where it does not pay: they run one after the other.
    """
    if beside is None or not beside.pays:
        return compute_s + transfer_s
    rate = 1 - beside.slowdown
    stretched_s = transfer_s * beside.stretch
    # The transfer ends first, and compute goes on alone; or compute ends first.
    transfer_first_s = stretched_s + compute_s - stretched_s * rate
    if not rate:
        return transfer_first_s
    computed_s = compute_s / rate
    compute_first_s = computed_s + transfer_s - computed_s / beside.stretch
    return np.where(stretched_s <= computed_s, transfer_first_s, compute_first_s)
