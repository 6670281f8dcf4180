"""Where a pipeline's idle time goes. O(actions) in practice, see below.

Every rank's share of the makespan is busy time or one of six kinds of idle time:

    warm-up        before its first action: the pipeline fills
    cool-down      after its last action: the other ranks drain
    p2p, dependency, stage imbalance, pack imbalance    the gaps between its actions

A gap is explained by the chain of actions and p2p transfers that made the rank wait (`simulate/critical_path.py`):
followed back from the action after the gap, it covers the gap without a hole. Its transfers are p2p. Why a rank waits
for the actions in it is asked by changing them: the same orders are simulated again with equal actions.

    dependency        what the rank would wait as well if all actions of a kind took their mean: the order's own price
    stage imbalance   what it would wait beyond that if packs were equal and stages were not (head, embedding, layers)
    pack imbalance    the rest: packs differ

so `busy + warm-up + cool-down + p2p + the three = ranks * makespan`, up to rounding. None is negative: a rank
waits for no other cause than its own gaps have, also where equal actions would make it wait longer. P2p transfers and
imbalance inside the warm-up count as warm-up. A rank without actions is idle in cool-down for the whole makespan.

Price: three simulations, and for each one numpy pass for every action of the longest chain inside one gap; chains are
short, about one action a stage, because their actions follow each other in time within the gap.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.simulate.critical_path import binding_predecessors
from evenload.simulate.simulate import Simulation, simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks


class Bubble(NamedTuple):
    """Idle seconds summed over ranks, names as in `TimeSplit`; `imbalance_s` is that of packs."""

    warmup_s: float
    cooldown_s: float
    p2p_s: float
    dependency_s: float
    stage_imbalance_s: float
    imbalance_s: float


def split_bubble(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> Bubble:
    """Split the idle time of a simulated schedule."""
    start, end = simulation.start_s, simulation.end_s
    first = actions.rank_offset[:-1]
    last = actions.rank_offset[1:] - 1
    used = last >= first
    p2p_s, waiting_s = _gaps(tasks, actions, simulation)
    # Seconds each rank would wait were packs equal, and were stages equal too.
    of_stages_s, of_order_s = (
        _gaps(even, actions, simulate(even, actions))[1] if waiting_s.any() else waiting_s
        for even in (_with_mean_seconds(tasks, (0,)), _with_mean_seconds(tasks, (0, 1)))
    )
    dependency_s = np.minimum(waiting_s, of_order_s)
    stage_imbalance_s = np.maximum(0.0, np.minimum(waiting_s, of_stages_s) - dependency_s)
    return Bubble(
        warmup_s=float(start[first[used]].sum()),
        cooldown_s=float((simulation.makespan_s - end[last[used]]).sum()) + simulation.makespan_s * int((~used).sum()),
        p2p_s=float(p2p_s.sum()),
        dependency_s=float(dependency_s.sum()),
        stage_imbalance_s=float(stage_imbalance_s.sum()),
        imbalance_s=float((waiting_s - dependency_s - stage_imbalance_s).sum()),
    )


def _gaps(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Every rank's gaps by what fills the chains before them: (transfers, actions) seconds; float64[R] each."""
    start, end = simulation.start_s, simulation.end_s
    source, _ = binding_predecessors(tasks, actions, simulation)
    inner = np.ones(len(start), dtype=bool)
    inner[actions.rank_offset[:-1][np.diff(actions.rank_offset) > 0]] = False
    at = np.flatnonzero(inner)  # actions with an earlier one on their rank
    low = end[at - 1]
    waits = start[at] > low
    at, low = at[waits], low[waits]
    rank = actions.rank[at]
    hops_s, actions_s = np.zeros((2, actions.num_ranks))
    while len(at):
        # From the start of `at` back to the end of what it waited for: a transfer, or nothing on the same rank.
        producer = source[at]
        arrived = np.maximum(low, end[producer])
        began = np.maximum(low, np.minimum(arrived, start[producer]))
        hops_s += np.bincount(rank, weights=start[at] - arrived, minlength=actions.num_ranks)
        actions_s += np.bincount(rank, weights=arrived - began, minlength=actions.num_ranks)
        more = start[producer] > low  # then its start is later than the step's, so it has a producer, too
        at, low, rank = producer[more], low[more], rank[more]
    return hops_s, actions_s


def _with_mean_seconds(tasks: PipelineTasks, axis: tuple[int, ...]) -> PipelineTasks:
    """The same tasks with the mean over packs (axis 0), or over packs and stages (0, 1), of every kind's seconds."""

    def mean(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.zeros_like(seconds) + (seconds.mean(axis=axis, keepdims=True) if len(seconds) else 0.0)

    split = tasks.split
    if split is not None:
        split = dataclasses.replace(split, input_s=mean(split.input_s), weight_s=mean(split.weight_s))
    return dataclasses.replace(tasks, forward_s=mean(tasks.forward_s), backward_s=mean(tasks.backward_s), split=split)
