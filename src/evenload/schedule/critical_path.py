"""Find the critical path of a simulated schedule, and where the idle time of its ranks goes (`split_bubble`).

An action starts when its last input is there, from the action before it on its rank or from the neighbour stage (its
binding predecessor; of two at the same time the one of its rank). Followed back from the last end they are the critical
path, whose seconds add up to the makespan to the last bit. O(actions) numpy; no graph is built.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.schedule.simulate import Simulation, simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks


class CriticalPath(NamedTuple):
    """The actions that set a replica's makespan, as int64[k] indices into the action columns, first to last, and
    float64[k] seconds of the transfer that ends when each starts."""

    actions: NDArray[np.int64]
    p2p_s: NDArray[np.float64]


def _binding_predecessors(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the action that each one waited for last, -1 = none, and the seconds of the transfer from it, 0 on its own
    rank; int64[n], float64[n]."""
    count = len(actions.kind)
    source = np.arange(-1, count - 1, dtype=np.int64)
    source[actions.rank_offset[:-1][np.diff(actions.rank_offset) > 0]] = -1
    free_s = np.where(source >= 0, simulation.end_s[source], 0.0) if count else np.zeros(0)
    producer = _producers(tasks, actions)
    arrives = np.flatnonzero((producer >= 0) & ((simulation.start_s > free_s) | (source < 0)))
    source[arrives] = producer[arrives]
    p2p_s = np.zeros(count)
    p2p_s[arrives] = _p2p_seconds(tasks, actions)[arrives]
    return source, p2p_s


def critical_path(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> CriticalPath:
    """Return the path that ends last; of equal ends the one on the lowest rank."""
    source, p2p_s = _binding_predecessors(tasks, actions, simulation)
    path: list[int] = []
    at = int(simulation.end_s.argmax()) if len(simulation.end_s) else -1
    while at >= 0:
        path.append(at)
        at = int(source[at])
    chain = np.array(path[::-1], np.int64)
    return CriticalPath(chain, p2p_s[chain])


def _producers(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.int64]:
    """Return the neighbour stage's action that feeds each action; int64[n], -1 where there is none."""
    most_packs = max(tasks.num_forward, tasks.num_backward)
    # A border around the stages stands for "no neighbour".
    place = np.full((3, most_packs, tasks.num_stages + 2), -1, np.int64)
    direction = np.array([0, 1, 1, 2])[actions.kind]  # I stands for B; W is fed by its own stage
    place[direction, actions.pack, actions.stage + 1] = np.arange(len(actions.kind))
    neighbour = actions.stage + np.where(direction == 0, 0, 2)
    return np.where(direction == 2, -1, place[direction, actions.pack, neighbour])


def _p2p_seconds(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.float64]:
    """Return the seconds of the transfer of each action's input, had it a producer; float64[n]."""
    p2p_s = np.zeros(len(actions.kind))
    forward, backward = actions.kind == 0, (actions.kind == 1) | (actions.kind == 2)
    p2p_s[forward] = tasks.p2p_forward_s[actions.pack[forward]]
    p2p_s[backward] = tasks.p2p_backward_s[actions.pack[backward]]
    return p2p_s


def p2p_transfers(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Return all transfers between stages as (producer, consumer, start, end); int64[h] actions and float64[h] seconds.
    Those of one link do not queue behind each other."""
    producer = _producers(tasks, actions)
    consumer = np.flatnonzero(producer >= 0)
    start_s = simulation.end_s[producer[consumer]]
    return producer[consumer], consumer, start_s, start_s + _p2p_seconds(tasks, actions)[consumer]


class Bubble(NamedTuple):
    """Idle seconds summed over ranks, none negative; with busy time they add up to ranks * makespan.

    Args:
        warmup_s: before a rank's first action (p2p and imbalance included).
        cooldown_s: after its last action; the whole makespan of a rank without actions.
        p2p_s: transfers in the chains of actions that a rank waited for in a gap.
        dependency_s: what it would wait too if all actions of a kind took their mean: the price of the order.
        stage_imbalance_s: what it would wait beyond that if packs were equal and stages were not.
        imbalance_s: the rest, of packs.
    """

    warmup_s: float
    cooldown_s: float
    p2p_s: float
    dependency_s: float
    stage_imbalance_s: float
    imbalance_s: float


def split_bubble(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> Bubble:
    """Split the idle time of a simulated schedule by cause, with two more simulations."""
    start, end = simulation.start_s, simulation.end_s
    first = actions.rank_offset[:-1]
    last = actions.rank_offset[1:] - 1
    used = last >= first
    p2p_s, waiting_s = _gaps(tasks, actions, simulation)
    # Seconds that each rank would wait if packs were equal, and if stages were equal too.
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
    """Return the seconds of transfers and of actions in the chains that ranks waited for in gaps; float64[R] each."""
    start, end = simulation.start_s, simulation.end_s
    source, _ = _binding_predecessors(tasks, actions, simulation)
    inner = np.ones(len(start), dtype=bool)
    inner[actions.rank_offset[:-1][np.diff(actions.rank_offset) > 0]] = False
    at = np.flatnonzero(inner)  # actions with an earlier one on their rank
    low = end[at - 1]
    waits = start[at] > low
    at, low = at[waits], low[waits]
    rank = actions.rank[at]
    hops_s, actions_s = np.zeros((2, actions.num_ranks))
    while len(at):
        # From the start of `at` back to the end of what it waited for there is a transfer, or nothing on the same rank.
        producer = source[at]
        arrived = np.maximum(low, end[producer])
        began = np.maximum(low, np.minimum(arrived, start[producer]))
        hops_s += np.bincount(rank, weights=start[at] - arrived, minlength=actions.num_ranks)
        actions_s += np.bincount(rank, weights=arrived - began, minlength=actions.num_ranks)
        more = start[producer] > low  # then its start is later than the step's, so it has a producer, too
        at, low, rank = producer[more], low[more], rank[more]
    return hops_s, actions_s


def _with_mean_seconds(tasks: PipelineTasks, axis: tuple[int, ...]) -> PipelineTasks:
    """Return the tasks with the mean over packs (axis 0), or over packs and stages (0, 1), of every kind's seconds."""

    def mean(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.zeros_like(seconds) + (seconds.mean(axis=axis, keepdims=True) if len(seconds) else 0.0)

    split = tasks.split
    if split is not None:
        split = dataclasses.replace(split, input_s=mean(split.input_s), weight_s=mean(split.weight_s))
    return dataclasses.replace(tasks, forward_s=mean(tasks.forward_s), backward_s=mean(tasks.backward_s), split=split)
