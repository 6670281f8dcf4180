"""FlexPipe's O_plan (§5.1): layers that recompute, as few in every stage as memory asks for.

A layout that does not hold a step as it is may hold it if some layers of its full stages make their products again in
backward, for all documents (Sun et al., AdaPipe, choose layers stage by stage, too). Ours, which recomputes or offloads
chosen documents in all stages (`plan.search.policy_order`), is the other candidate: the first pays in stages that lack
memory only, the second only for long documents.

The paper's O_plan offloads portions of the optimizer as well. The runtime keeps optimizer state on the device, so no
plan can ask for that: T_swap of this candidate is 0.

A stage's peak falls nearly linearly with its recomputed layers, as long as its schedule stays: a first guess, then the
slope that a plan shows, gives the next number. Price: at most `MOST_PLANS` plans.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import activation_bytes_per_token, kv_bytes_per_token, recomputed_width
from evenload.plan.planner import Proposal
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

MOST_PLANS = 6

PlanWith = Callable[[ParallelLayout], Proposal]
"""A step in a layout that recomputes some of its layers, all documents alike."""


def plan_recomputing_layers(
    model: ModelSpec, layout: ParallelLayout, cap_bytes: int, plan_with: PlanWith
) -> Proposal | None:
    """The fastest plan that fits among those with few recomputed layers.

    Args:
        layout: with one stage a rank and one rank a stage and replica; others have no plan of this kind.
        cap_bytes: of a device.

    Returns:
        None where recomputing all layers of the stages that lack memory does not do.
    """
    most = np.array(layout.stage_counts, np.int64)
    stored = plan_with(layout)
    stored_bytes = _peak_bytes(stored)
    if len(stored_bytes) != len(most):
        return None
    lacking = np.maximum(0, stored_bytes - cap_bytes)
    saved = np.maximum(1.0, _share_of_layer(model, layout) * stored_bytes)
    counts, best, tried = _needed(lacking, saved, most), None, set[tuple[int, ...]]()
    for _ in range(MOST_PLANS - 1):
        tried.add(tuple(counts.tolist()))
        found = plan_with(layout.recomputing(counts.tolist()))
        peak_bytes = _peak_bytes(found)
        if found.feasible and (best is None or _seconds(found) < _seconds(best)):
            best = found
        saved = np.where(counts > 0, np.maximum(1.0, (stored_bytes - peak_bytes) / np.maximum(counts, 1)), saved)
        still_lacking = peak_bytes > cap_bytes
        if (still_lacking & (counts == most)).any():
            break
        # More where it was too little, whatever the slope says.
        counts = np.maximum(_needed(lacking, saved, most), np.where(still_lacking, counts + 1, 0))
        if tuple(counts.tolist()) in tried:
            break
    return best


def _needed(lacking: NDArray[np.int64], saved: NDArray[np.float64], most: NDArray[np.int64]) -> NDArray[np.int64]:
    """Layers of every stage that save what it lacks, at one layer's bytes; all of them where they are too few."""
    return np.minimum(most, np.ceil(lacking / saved).astype(np.int64))


def _share_of_layer(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.float64]:
    """Of what packs hold on a stage, what one recomputed layer saves. The peak holds more: a low first guess."""
    tp = layout.tp
    kept = activation_bytes_per_token(model, "replay", tp) + kv_bytes_per_token(model, tp)
    return model.bytes_per_element * recomputed_width(model, tp) / (kept * np.array(layout.stage_counts))


def _peak_bytes(proposal: Proposal) -> NDArray[np.int64]:
    """Of every pipeline rank, on the replica where it holds most."""
    return np.max([choice.candidate.simulation.peak_bytes for choice in proposal.choices], axis=0)


def _seconds(proposal: Proposal) -> float:
    return proposal.plan.predicted.step_time_s
