"""Micro-batches around each of whose units the ranks gather weights (FSDP2, ZeRO-3), or sum gradients after each.

    forward    gather   0 | 1   | 2     | 3            backward   gather   3 | 2   | 1     | 0
               compute    | 0   | 1     | 2   | 3                 compute    | 3   | 2     | 1     | 0
                                                                  sum              | 3     | 2     | 1   | 0

The gather of the next unit and the sum of the one before run beside the compute of a unit, one after the other; the
first gather of a pass and the last sum of a backward nobody hides. What they and compute cost each other
say `CostCoefficients.gather_overlap` and `reduction_overlap`; without these all run one after the other.

Gathered are all weights of a unit, those that are not trained too (LoRA); summed are gradients, so trained ones only.
DeepSpeed sums whenever a bucket of gradients is full: half a billion by default, so a model of that size hides nothing.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import OverlapCost
from evenload.cost.first_forward import forward_units
from evenload.cost.last_backward import pack_features, stage_units, unit_seconds
from evenload.cost.pack_cost import PackCosts
from evenload.cost.unit_transfers import unit_transfers
from evenload.engines.profile import EngineTiming
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction
from evenload.types.pipeline import PipelineTasks

Transfer = tuple[float, OverlapCost | None]
"""Seconds alone, and what it and compute cost each other; None = it runs alone."""


def with_pass_transfers(
    costs: PackCosts, columns: SliceColumns, tasks: PipelineTasks, timing: EngineTiming
) -> PipelineTasks:
    """The same packs of one stage with transfers in their seconds: weights are gathered before every forward and
    backward, gradients summed after every backward, each where the engine does it in every pass.
    """
    if not columns.num_packs:
        return tasks
    features = pack_features(costs, [(columns, pack) for pack in range(columns.num_packs)])
    gather_s = unit_gathers(costs) if timing.weights == "pass" else {}
    sum_s = bucket_sums(costs, timing.sum_bucket_parameters) if timing.sums == "pass" else {}
    coefficients = costs.coefficients

    def seconds(direction: Direction, units: list[int], pack_s: NDArray[np.float64]) -> NDArray[np.float64]:
        unit_s = unit_seconds(costs, features, units, direction)
        total_s = unit_s.sum(axis=1)
        # Halves, host and policies are in the pack's seconds and not in its units'.
        unit_s *= np.divide(pack_s, total_s, out=np.ones_like(pack_s), where=total_s > 0)[:, None]
        own_gathers_s = [gather_s.get(unit, 0.0) for unit in units]
        own_sums_s = [sum_s.get(unit, 0.0) if direction == "backward" else 0.0 for unit in units]
        found = np.full(len(pack_s), own_gathers_s[0] + own_sums_s[-1])
        beside = zip([*own_gathers_s[1:], 0.0], [0.0, *own_sums_s[:-1]], strict=True)
        for at, (next_s, last_s) in enumerate(beside):
            transfers = (next_s, coefficients.gather_overlap), (last_s, coefficients.reduction_overlap)
            found += beside_seconds(unit_s[:, at], transfers)
        return found

    forward_s = seconds("forward", forward_units(costs, 0), tasks.forward_s[:, 0])
    backward_s = seconds("backward", stage_units(costs, 0), tasks.backward_s[:, 0])
    return replace(tasks, forward_s=forward_s[:, None], backward_s=backward_s[:, None])


def unit_gathers(costs: PackCosts) -> dict[int, float]:
    """Seconds in which all weights of each unit of the one stage are gathered, by its number
    (`cost.memory.trained_unit_parameters`)."""
    model, layout = costs.model, costs.layout
    # As if all were trained: what a unit holds beside adapters.
    whole = unit_transfers(
        msgspec.structs.replace(model, adapter_parameters_per_layer=0), costs.coefficients, layout, 0
    )
    found = dict(zip(whole.unit.tolist(), whole.gather_s.tolist(), strict=True))
    if model.adapter_parameters_per_layer:
        for unit, seconds in _seconds_of_trained(costs, "gather_s").items():
            found[unit] += seconds
    return found


def unit_sums(costs: PackCosts) -> dict[int, float]:
    """Seconds in which the gradients of each unit that has any are summed."""
    return _seconds_of_trained(costs, "sum_s")


def bucket_sums(costs: PackCosts, bucket_parameters: int) -> dict[int, float]:
    """The same of units that wait for each other until they fill a bucket, at the unit of the bucket that comes last in
    a backward.

    A bucket is summed when the next unit does not fit into it (DeepSpeed's `reduce_bucket_size`), so beside that unit's
    backward, and what is left after the last one's. Each unit's own latencies stay in it.

    Args:
        bucket_parameters: at most in a bucket, unless a unit alone has more; 0 = unit by unit.
    """
    sum_s = unit_sums(costs)
    transfers = unit_transfers(costs.model, costs.coefficients, costs.layout, 0)
    parameters = dict(zip(transfers.unit.tolist(), transfers.parameters.tolist(), strict=True))
    found: dict[int, float] = {}
    held, held_s = 0, 0.0
    units = [unit for unit in stage_units(costs, 0) if unit in sum_s]
    for unit, after in itertools.zip_longest(units, units[1:]):
        held, held_s = held + parameters[unit], held_s + sum_s[unit]
        if after is None or held + parameters[after] > bucket_parameters:
            found[unit] = held_s
            held, held_s = 0, 0.0
    return found


def _seconds_of_trained(costs: PackCosts, field: str) -> dict[int, float]:
    transfers = unit_transfers(costs.model, costs.coefficients, costs.layout, 0)
    return dict(zip(transfers.unit.tolist(), getattr(transfers, field).tolist(), strict=True))


def beside_seconds(compute_s: NDArray[np.float64], transfers: Sequence[Transfer]) -> NDArray[np.float64]:
    """Of compute and transfers that begin together, one transfer after the other, until all have ended; float64[n].

    Args:
        compute_s: float64[n], alone.
        transfers: in their order. Compute waits for one without an overlap.
    """
    left_s, now_s = compute_s.copy(), np.zeros_like(compute_s)
    for transfer_s, overlap in transfers:
        if overlap is None or not overlap.pays:
            now_s += transfer_s
            continue
        rate, stretched_s = 1 - overlap.compute_slowdown, transfer_s * overlap.communication_slowdown
        if not rate:
            now_s += stretched_s
            continue
        # The transfer ends first, and compute goes on; or compute ends first, and the transfer alone.
        ends_first = stretched_s * rate <= left_s
        compute_first_s = left_s / rate + transfer_s - left_s / rate / overlap.communication_slowdown
        now_s += np.where(ends_first, stretched_s, compute_first_s)
        left_s = np.where(ends_first, left_s - stretched_s * rate, 0.0)
    return now_s + left_s
