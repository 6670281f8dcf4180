"""What precedes a step's packs: updated weights gathered unit by unit, beside the update and the first forwards.

The update runs from the start of the model to its end, and a unit's gather follows it and the gather before it
(`runtime.optim.weight_gathers`). A forward waits for the gathers of its own units, layer by layer, and the first
backward for all. Times follow two clocks, as at the end of a step (`simulate.step_end`): while a gather runs beside
compute it takes `communication_slowdown` times its seconds and compute goes on at the rate 1 - `compute_slowdown`;
while nothing is computed, because a forward waits for weights or the rank for its first pack, the gather takes its
seconds alone. What a rank loses is put on its first forward, and the packs are simulated again. Ranks further down the
pipeline have the time that those before them lose.

The gathers priced in a step are those of the update before it, taken to be of the same layout. What is left out: the
first step of a run has none before it; what lies between two steps (the wait for data, the timeline, a checkpoint)
hides more of them.

Price: O(units) a rank, and one more simulation a replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import OverlapCost
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import forward_units, pack_features, shares_before, unit_transfers
from evenload.simulate.simulate import Simulation, simulate
from evenload.types.columns import SliceColumns
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False)
class SimulatedReplica:
    """One replica's packs, their order and when they run."""

    forward: SliceColumns
    backward: SliceColumns
    tasks: PipelineTasks
    actions: ActionColumns
    simulation: Simulation


@dataclass(frozen=True, eq=False)
class RankGathers:
    """The gathers of the units of one pipeline rank, over all that hold them, from the step's start.

    Args:
        unit: int64[n], in their order; start_s, end_s: float64[n], below 0 beside the update before the step.
        wait_start_s, wait_end_s: float64[m], when forwards wait for them.
        lost_s: by which the rank's first packs are later.
    """

    unit: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    wait_start_s: NDArray[np.float64]
    wait_end_s: NDArray[np.float64]
    lost_s: float

    @property
    def seconds(self) -> float:
        """In which a gather runs."""
        return float((self.end_s - self.start_s).sum())

    @property
    def hidden_s(self) -> float:
        """Of these, those in which nothing waits for it."""
        return max(0.0, self.seconds - float((self.wait_end_s - self.wait_start_s).sum()))


def first_gathers(costs: PackCosts, replicas: Sequence[SimulatedReplica]) -> tuple[RankGathers, ...]:
    """Of every pipeline rank; none where weights are whole when a step begins."""
    overlap, num_ranks = costs.coefficients.gather_overlap, costs.layout.pipeline_ranks
    if overlap is None or max(costs.layout.data_sizes) == 1:
        return ()
    needed_s, first_s = _needed_seconds(costs, replicas)
    found: dict[int, RankGathers] = {}
    total_s = np.zeros(num_ranks)
    for rank in np.argsort(first_s, kind="stable").tolist():
        later_s = float(total_s[first_s < first_s[rank]].max(initial=0.0))
        found[rank] = _rank_gathers(costs, overlap, rank, needed_s[rank], (float(first_s[rank]), later_s))
        total_s[rank] = later_s + found[rank].lost_s
    return tuple(found[rank] for rank in range(num_ranks))


def delayed(replica: SimulatedReplica, gathers: Sequence[RankGathers]) -> SimulatedReplica:
    """With what every rank loses on its first forward."""
    actions, num_stages = replica.actions, replica.tasks.forward_s.shape[1]
    forward_s = replica.tasks.forward_s.copy()
    places = _first_places(actions, "F", num_stages)
    for rank, one in enumerate(gathers):
        first = places[rank][places[rank] >= 0].min(initial=len(actions.kind))
        if one.lost_s > 0 and first < len(actions.kind):
            forward_s[actions.pack[first], actions.stage[first]] += one.lost_s
    tasks = replace(replica.tasks, forward_s=forward_s)
    return replace(replica, tasks=tasks, simulation=simulate(tasks, actions))


def _rank_gathers(
    costs: PackCosts, overlap: OverlapCost, rank: int, needed_s: Mapping[int, float], first: tuple[float, float]
) -> RankGathers:
    """Over all ranks that hold the layers of one.

    Args:
        needed_s: by unit, from the step's start, were nothing gathered.
        first: when the rank's first forward begins, and by how much later because of ranks before it.
    """
    layout, coefficients = costs.layout, costs.coefficients
    found = unit_transfers(costs.model, coefficients, layout, rank)
    updated_s = np.cumsum(coefficients.optimizer_s_per_parameter * found.parameters / layout.data_sizes[rank])
    update_end_s = float(updated_s[-1]) if len(updated_s) else 0.0
    first_s, later_s = first
    # On compute's clock, which begins with the update.
    needed = np.array([needed_s.get(unit, np.inf) for unit in found.unit.tolist()]) + update_end_s + later_s
    idle = update_end_s, update_end_s + first_s + later_s
    start_s, end_s, waits, lost_s = run_gathers(updated_s, needed, found.gather_s, idle, overlap)
    waits_s = np.array(waits, np.float64).reshape(-1, 2)
    return RankGathers(
        unit=found.unit,
        start_s=start_s - update_end_s,
        end_s=end_s - update_end_s,
        wait_start_s=waits_s[:, 0] - update_end_s,
        wait_end_s=waits_s[:, 1] - update_end_s,
        lost_s=lost_s,
    )


def run_gathers(
    updated_s: NDArray[np.float64],
    needed_s: NDArray[np.float64],
    alone_s: NDArray[np.float64],
    idle: tuple[float, float],
    overlap: OverlapCost,
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[tuple[float, float]], float]:
    """Start and end of every gather, in their order, float64[n] each; when compute waits for them, and all that it
    loses.

    Args:
        updated_s, needed_s: when each may begin and when compute reads what it brings, on compute's clock, were nothing
            beside compute; alone_s: were no compute beside the gathers.
        idle: from when to when nothing is computed, on that clock; it ends no later for what was lost before.
    """
    start_s, end_s = np.zeros(len(alone_s)), np.zeros(len(alone_s))
    waits: list[tuple[float, float]] = []
    # A gather is waited for by whoever waits for one behind it.
    wanted_s = np.minimum.accumulate(needed_s[::-1])[::-1].tolist()
    now_s = computed_s = 0.0
    for at, (updated, wanted, left_s) in enumerate(zip(updated_s.tolist(), wanted_s, alone_s.tolist(), strict=True)):
        if computed_s < updated:
            now_s, computed_s = now_s + updated - computed_s, updated
        start_s[at] = now_s
        while left_s > 0:
            if computed_s >= wanted:
                waits.append((now_s, now_s + left_s))
                now_s, left_s = now_s + left_s, 0.0
                continue
            if is_idle := idle[0] <= computed_s < idle[1]:
                computed_s = max(computed_s, min(now_s, idle[1]))
                is_idle = computed_s < idle[1]
            rate, stretch = (1.0, 1.0) if is_idle else (1 - overlap.compute_slowdown, overlap.communication_slowdown)
            change = min(edge for edge in (*idle, wanted, np.inf) if edge > computed_s)
            to_change_s = (change - computed_s) / rate if rate else np.inf
            whole_s = left_s * stretch
            if whole_s < to_change_s:
                now_s, computed_s, left_s = now_s + whole_s, computed_s + whole_s * rate, 0.0
            else:
                now_s, computed_s, left_s = now_s + to_change_s, change, left_s - to_change_s / stretch
        end_s[at] = now_s
    slack_s = max(0.0, idle[1] - max(idle[0], computed_s))
    return start_s, end_s, waits, max(0.0, now_s - computed_s - slack_s)


def _needed_seconds(
    costs: PackCosts, replicas: Sequence[SimulatedReplica]
) -> tuple[list[dict[int, float]], NDArray[np.float64]]:
    """By pipeline rank and unit when the first of the replicas reads its weights; and when each rank's first forward
    begins, 0 without any; float64[ranks]."""
    layout = costs.layout
    needed_s: list[dict[int, float]] = [{} for _ in range(layout.pipeline_ranks)]
    first_s = np.full(layout.pipeline_ranks, np.inf)
    for replica in replicas:
        actions, simulation = replica.actions, replica.simulation
        forwards = _first_places(actions, "F", layout.num_stages)
        packs = np.unique(actions.pack[forwards[forwards >= 0]])
        if not len(packs):
            continue
        features = pack_features(costs, [(replica.forward, pack) for pack in packs.tolist()])
        for rank, stage in np.argwhere(forwards >= 0).tolist():
            at = forwards[rank, stage]
            begin_s, seconds = float(simulation.start_s[at]), float(simulation.end_s[at] - simulation.start_s[at])
            first_s[rank] = min(first_s[rank], begin_s)
            row = int(np.searchsorted(packs, actions.pack[at]))
            shares = shares_before(costs, features[row : row + 1], stage)[0].tolist()
            for unit, share in zip(forward_units(costs, stage), shares, strict=True):
                needed_s[rank][unit] = min(needed_s[rank].get(unit, np.inf), begin_s + share * seconds)
        # Whatever a rank holds is there before its first backward, which may read the head.
        back = np.flatnonzero(actions.kind != KINDS.index("F"))
        head = 1 + costs.model.num_layers
        for rank in np.unique(actions.rank[back]).tolist():
            begin_s = float(simulation.start_s[back[actions.rank[back] == rank]].min())
            needed_s[rank][head] = min(needed_s[rank].get(head, np.inf), begin_s)
    return needed_s, np.where(np.isfinite(first_s), first_s, 0.0)


def _first_places(actions: ActionColumns, kind: str, num_stages: int) -> NDArray[np.int64]:
    """Of a kind's first action by rank and stage, -1 = none; int64[ranks, stages]."""
    found = np.full((actions.num_ranks, num_stages), -1, np.int64)
    at = np.flatnonzero(actions.kind == KINDS.index(kind))[::-1]
    found[actions.rank[at], actions.stage[at]] = at  # of several the first
    return found
