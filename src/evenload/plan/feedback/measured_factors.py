"""What one trained step says of the speed of every rank: measured over predicted seconds of its actions.

A rank's factor is the sum of its actions' measured seconds over the sum of what the cost coefficients give, without
actions that are off by more than `ODD` from the rank's median: a page fault or a neighbour's burst in one pack says
nothing of the next step. The predicted seconds are the plan's, so they hold the factors with which the step was
planned; these are multiplied back in, and a step that runs as planned confirms them.

Left out: packs that replicas share. Each rank waits there for the slowest member, so they say nothing of one. Ranks of
a tensor- or context-parallel group wait for each other in every pack, too, but are one rank here: the timeline holds
the busiest of them.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.stepplan.validate_groups import block_of
from evenload.types.plan import StepPlan
from evenload.types.replica_block import ReplicaBlock
from evenload.types.timeline import KINDS, Timeline

ODD = 2.0
"""Times the median ratio of a rank, or its half: beyond it an action is left out."""


def measured_factors(plan: StepPlan, measured: Timeline) -> NDArray[np.float64]:
    """Seconds of every rank's packs over those that the cost coefficients give; float64[dp, pp], NaN where the step
    says nothing: the rank ran no pack, or only shared ones."""
    layout = plan.layout
    factors = np.full((layout.dp, layout.pp), np.nan)
    for dp_rank in range(layout.dp):
        predicted_s = _predicted_seconds(plan, dp_rank)
        mine = np.flatnonzero(measured.dp_rank == dp_rank)
        for rank in range(layout.pp):
            rows = mine[measured.rank[mine] == rank]
            expected_s = np.array(
                [
                    predicted_s[KINDS[kind]][pack, stage]
                    for kind, pack, stage in zip(
                        measured.kind[rows].tolist(),
                        measured.pack[rows].tolist(),
                        measured.stage[rows].tolist(),
                        strict=True,
                    )
                ]
            )
            ratio = _typical_ratio((measured.end_s - measured.start_s)[rows], expected_s)
            used = 1.0 if plan.speeds is None else plan.speeds.factors(dp_rank)[rank]
            factors[dp_rank, rank] = ratio * used
    return factors


def rank_work_s(plan: StepPlan) -> NDArray[np.float64]:
    """Predicted seconds of every rank's packs, were all as fast as the cost coefficients say; float64[dp, pp]."""
    layout = plan.layout
    work_s = np.zeros((layout.dp, layout.pp))
    for dp_rank, times in enumerate(plan.times):
        packs = plan.pack_plans[dp_rank]
        for listed, rows in ((packs.forward, times.forward_s), (packs.backward, times.backward_s)):
            for pack, row in zip(listed, rows, strict=True):
                factors = _planned_factors(plan, block_of(plan, dp_rank, pack))
                np.add.at(work_s[dp_rank], list(layout.stage_to_rank), np.array(row) / factors)
    return work_s


def _planned_factors(plan: StepPlan, block: ReplicaBlock) -> NDArray[np.float64]:
    """With which packs were priced that these replicas share; by virtual stage."""
    if plan.speeds is None:
        return np.ones(plan.layout.num_stages)
    return np.array(plan.speeds.block_factors(block))[list(plan.layout.stage_to_rank)]


def _predicted_seconds(plan: StepPlan, dp_rank: int) -> dict[str, NDArray[np.float64]]:
    """By kind of action, float64[packs, stages]; NaN for packs that replicas share."""
    packs, times = plan.pack_plans[dp_rank], plan.times[dp_rank]
    shape = (-1, plan.layout.num_stages)
    alone = [
        np.array([block_of(plan, dp_rank, pack).size == 1 for pack in listed], bool)
        for listed in (packs.forward, packs.backward)
    ]
    rows = {
        "F": (times.forward_s, alone[0]),
        "B": (times.backward_s, alone[1]),
        "I": (times.input_s, alone[1]),
        "W": (times.weight_s, alone[1]),
    }
    return {
        kind: np.where(own[:, None], np.array(seconds, np.float64).reshape(shape), np.nan)
        for kind, (seconds, own) in rows.items()
        if len(seconds)
    }


def _typical_ratio(measured_s: NDArray[np.float64], expected_s: NDArray[np.float64]) -> float:
    known = expected_s > 0  # False for NaN, too
    if not known.any():
        return float("nan")
    measured_s, expected_s = measured_s[known], expected_s[known]
    ratios = measured_s / expected_s
    # Of the work, not of the actions: many short packs say less than a few long ones.
    order = np.argsort(ratios, kind="stable")
    half = np.searchsorted(np.cumsum(expected_s[order]), expected_s.sum() / 2)
    median = float(ratios[order[min(half, len(order) - 1)]])
    near = (ratios <= ODD * median) & (ratios * ODD >= median)
    return float(measured_s[near].sum() / expected_s[near].sum())
