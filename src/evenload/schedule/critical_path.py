"""The critical path of a simulated schedule, and where the idle time of its ranks goes (`split_bubble`).

The critical path: the chain of actions and p2p transfers, from start to end of the step, that sets the makespan.

Every action starts the moment its last input is there: when the action before it on its rank has ended, or when the
transfer from the neighbour stage arrives. That input is its *binding* predecessor (of two that are there at the same
time the one on its own rank). Following binding predecessors back from the last end gives the path. It has no gap:
its seconds, added up from the start, are the makespan to the last bit. Shortening anything else changes nothing.

The list of actions is the longest path of the graph of dependencies, read off a finished simulation
(start and end times) instead of the graph: O(V + E), numpy, no graph is built.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.schedule.simulate import Simulation, simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """The chain that sets a replica's makespan.

    Args:
        actions: int64[k], indices into the action columns, first to last; empty without actions.
        p2p_s: float64[k], seconds of the transfer that ends when the action starts.
        compute_s: float64[R, 4], seconds on the path by pipeline rank and kind (order of `KINDS`).
        makespan_s: transfers and actions added up.
    """

    actions: NDArray[np.int64]
    p2p_s: NDArray[np.float64]
    compute_s: NDArray[np.float64]
    makespan_s: float

    @property
    def communication_s(self) -> float:
        return float(self.p2p_s.sum())

    def describe(self) -> str:
        """What bounds the makespan, in one line; "" without actions.

        For example `rank 3 computes 91.2 % (F 30.1, B 61.1), ranks 0, 1, 2 fill and drain 8.0 %, p2p 0.8 %`.
        """
        if not self.makespan_s > 0:
            return ""
        shares = 100.0 * self.compute_s / self.makespan_s
        of_rank = shares.sum(axis=1)
        main = int(of_rank.argmax())
        kinds = ", ".join(f"{kind} {share:.1f}" for kind, share in zip(KINDS, shares[main], strict=True) if share > 0)
        text = f"rank {main} computes {of_rank[main]:.1f} % of it ({kinds})"
        others = [rank for rank in np.flatnonzero(of_rank > 0).tolist() if rank != main]
        if others:
            named = f"rank {others[0]}" if len(others) == 1 else f"{len(others)} other ranks"
            text += f", {named} {float(of_rank[others].sum()):.1f} %"
        return f"{text}, p2p {100.0 * self.communication_s / self.makespan_s:.1f} %"


def binding_predecessors(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What each action waited for last: (action, seconds of the transfer between the two); int64[n], float64[n].

    An action that starts with the step has -1; on the same rank the transfer takes 0.
    """
    count = len(actions.kind)
    source = np.arange(-1, count - 1, dtype=np.int64)
    source[actions.rank_offset[:-1][np.diff(actions.rank_offset) > 0]] = -1
    free_s = np.where(source >= 0, simulation.end_s[source], 0.0) if count else np.zeros(0)
    producer = producers(tasks, actions)
    arrives = np.flatnonzero((producer >= 0) & ((simulation.start_s > free_s) | (source < 0)))
    source[arrives] = producer[arrives]
    p2p_s = np.zeros(count)
    p2p_s[arrives] = p2p_seconds(tasks, actions)[arrives]
    return source, p2p_s


def critical_path(tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation) -> CriticalPath:
    """The path that ends last; of equal ends the one on the lowest rank."""
    source, p2p_s = binding_predecessors(tasks, actions, simulation)
    path: list[int] = []
    at = int(simulation.end_s.argmax()) if len(simulation.end_s) else -1
    while at >= 0:
        path.append(at)
        at = int(source[at])
    chain = np.array(path[::-1], np.int64)
    seconds = action_seconds(tasks, actions)[chain]
    compute_s = np.zeros((actions.num_ranks, len(KINDS)))
    np.add.at(compute_s, (actions.rank[chain], actions.kind[chain]), seconds)
    total_s = 0.0
    for waited_s, compute in zip(p2p_s[chain].tolist(), seconds.tolist(), strict=True):
        total_s = total_s + waited_s + compute  # in the order in which the simulator added them
    return CriticalPath(chain, p2p_s[chain], compute_s, total_s)


def producers(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.int64]:
    """The neighbour stage's action that feeds each action; int64[n], -1 where there is none."""
    most_packs = max(tasks.num_forward, tasks.num_backward)
    # A border around the stages stands for "no neighbour".
    place = np.full((3, most_packs, tasks.num_stages + 2), -1, np.int64)
    direction = np.array([0, 1, 1, 2])[actions.kind]  # I stands for B; W is fed by its own stage
    place[direction, actions.pack, actions.stage + 1] = np.arange(len(actions.kind))
    neighbour = actions.stage + np.where(direction == 0, 0, 2)
    return np.where(direction == 2, -1, place[direction, actions.pack, neighbour])


def p2p_seconds(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.float64]:
    """Seconds of the transfer that brings each action's input, were there a producer; float64[n]."""
    p2p_s = np.zeros(len(actions.kind))
    forward, backward = actions.kind == 0, (actions.kind == 1) | (actions.kind == 2)
    p2p_s[forward] = tasks.p2p_forward_s[actions.pack[forward]]
    p2p_s[backward] = tasks.p2p_backward_s[actions.pack[backward]]
    return p2p_s


def p2p_transfers(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """All transfers between stages as (producer, consumer, start, end); int64[h] actions and float64[h] seconds.

    A transfer starts when its producer has ended; those of one link do not queue behind each other (an edge delay).
    """
    producer = producers(tasks, actions)
    consumer = np.flatnonzero(producer >= 0)
    start_s = simulation.end_s[producer[consumer]]
    return producer[consumer], consumer, start_s, start_s + p2p_seconds(tasks, actions)[consumer]


def action_seconds(tasks: PipelineTasks, actions: ActionColumns) -> NDArray[np.float64]:
    """Seconds of every action as planned; float64[n]."""
    parts = [tasks.forward_s, tasks.backward_s]
    parts += [tasks.split.input_s, tasks.split.weight_s] if tasks.split else []
    seconds = np.zeros(len(actions.kind))
    for kind, of_kind in enumerate(parts):
        chosen = actions.kind == kind
        seconds[chosen] = of_kind[actions.pack[chosen], actions.stage[chosen]]
    return seconds


# Where a pipeline's idle time goes. O(actions) in practice, see below.
#
# Every rank's share of the makespan is busy time or one of six kinds of idle time:
#
#     warm-up        before its first action: the pipeline fills
#     cool-down      after its last action: the other ranks drain
#     p2p, dependency, stage imbalance, pack imbalance    the gaps between its actions
#
# A gap is explained by the chain of actions and p2p transfers that made the rank wait (`critical_path`):
# followed back from the action after the gap, it covers the gap without a hole. Its transfers are p2p. Why a rank
# waits for the actions in it is asked by changing them: the same orders are simulated again with equal actions.
#
#     dependency        what the rank would wait as well if all actions of a kind took their mean: the order's own price
#     stage imbalance   what it would wait beyond that if packs were equal and stages were not (head, embedding, layers)
#     pack imbalance    the rest: packs differ
#
# so `busy + warm-up + cool-down + p2p + the three = ranks * makespan`, up to rounding. None is negative: a rank waits
# for no other cause than its own gaps have, also where equal actions would make it wait longer. P2p transfers and
# imbalance inside the warm-up count as warm-up. A rank without actions is idle in cool-down for the whole makespan.
#
# Price: three simulations, and for each one numpy pass for every action of the longest chain inside one gap; chains
# are short, about one action a stage, because their actions follow each other in time within the gap.


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
