"""Time the collectives before, during and after a step's packs: all-gathers of updated weights, reduce-scatters of
gradients; and the update.

As in `runtime.optim.data_parallel` weights are gathered unit by unit (embedding, layers, head), after the update of the
unit and the gather before it. A forward waits for the gathers of its own units, the first backward for all. Gradients
are reduced unit by unit from the head down, as soon as the last replica has completed a unit and the reduction before
it is done. The update needs the gradient's norm, and so all reductions.

A replica that shares packs reduces nothing before it has run all of them on all pipeline ranks, by prediction
(`num_before_sums`), so that no circle of waits goes through a shared pack and a reduction (docs/decisions/03). Packs
with which all that share them end do not count.

Times follow two clocks: a collective during compute takes `communication_slowdown` times its seconds, and compute goes
on at the rate 1 - `compute_slowdown` (`cost.coefficients.OverlapCost`); while nothing is computed it takes its seconds
alone. What a rank loses to gathers is added to its first forward, and the packs are simulated again.

Not modelled: gathers of a layout other than the step's; the time between two steps, which hides more of them; that a
rank whose last backward is slowed lets the stage before it wait longer. O(replicas · (actions + stages) + units).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import OverlapCost
from evenload.cost.memory import ReplicaPacks
from evenload.cost.pack_cost import PackCosts
from evenload.cost.units import pack_features, stage_units, unit_shares, unit_transfers
from evenload.schedule.simulate import Simulation, simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False)
class SimulatedReplica:
    """One replica's packs, their order and when they run."""

    packs: ReplicaPacks
    tasks: PipelineTasks
    actions: ActionColumns
    simulation: Simulation


@dataclass(frozen=True, eq=False)
class RankGathers:
    """All-gathers of the weights of one pipeline rank, unit by unit, float64[n] from the step's start (below 0 during
    the update before the step); when forwards wait for them, float64[m]; and by how much its first packs are later."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    wait_start_s: NDArray[np.float64]
    wait_end_s: NDArray[np.float64]
    lost_s: float

    @property
    def seconds(self) -> float:
        """Seconds in which a gather runs."""
        return float((self.end_s - self.start_s).sum())

    @property
    def hidden_s(self) -> float:
        """Those of `seconds` in which nothing waits for it."""
        return max(0.0, self.seconds - float((self.wait_end_s - self.wait_start_s).sum()))


def _first_gathers(costs: PackCosts, replicas: Sequence[SimulatedReplica]) -> tuple[RankGathers, ...]:
    """Return the gathers of every pipeline rank; none where weights are whole when a step begins."""
    overlap, num_ranks = costs.coefficients.gather_overlap, costs.layout.pipeline_ranks
    if overlap is None or max(costs.layout.data_sizes) == 1:
        return ()
    needed_s, first_s = _needed_seconds(costs, replicas)
    gathers: dict[int, RankGathers] = {}
    total_s = np.zeros(num_ranks)
    for rank in np.argsort(first_s, kind="stable").tolist():
        later_s = float(total_s[first_s < first_s[rank]].max(initial=0.0))
        gathers[rank] = _rank_gathers(costs, overlap, rank, needed_s[rank], float(first_s[rank]), later_s)
        total_s[rank] = later_s + gathers[rank].lost_s
    return tuple(gathers[rank] for rank in range(num_ranks))


def _delayed(replica: SimulatedReplica, gathers: Sequence[RankGathers]) -> SimulatedReplica:
    """Add what every rank loses to its first forward."""
    actions, num_stages = replica.actions, replica.tasks.forward_s.shape[1]
    forward_s = replica.tasks.forward_s.copy()
    places = _first_places(actions, num_stages)
    for rank, one in enumerate(gathers):
        first = places[rank][places[rank] >= 0].min(initial=len(actions.kind))
        if one.lost_s > 0 and first < len(actions.kind):
            forward_s[actions.pack[first], actions.stage[first]] += one.lost_s
    tasks = replace(replica.tasks, forward_s=forward_s)
    return replace(replica, tasks=tasks, simulation=simulate(tasks, actions))


def _rank_gathers(
    costs: PackCosts, overlap: OverlapCost, rank: int, needed_s: Mapping[int, float], first_s: float, later_s: float
) -> RankGathers:
    """Time the gathers of a rank whose first forward begins at `first_s`, and by `later_s` later for other ranks'."""
    layout, coefficients = costs.layout, costs.coefficients
    transfers = unit_transfers(costs.model, coefficients, layout, rank)
    updated_s = np.cumsum(coefficients.optimizer_s_per_parameter * transfers.parameters / layout.data_sizes[rank])
    update_end_s = float(updated_s[-1]) if len(updated_s) else 0.0
    # On compute's clock, which begins with the update.
    needed = np.array([needed_s.get(unit, np.inf) for unit in transfers.unit.tolist()]) + update_end_s + later_s
    idle = update_end_s, update_end_s + first_s + later_s
    start_s, end_s, waits, lost_s = run_collectives(updated_s, needed, transfers.gather_s, idle, overlap)
    waits_s = np.array(waits, np.float64).reshape(-1, 2)
    return RankGathers(
        start_s=start_s - update_end_s,
        end_s=end_s - update_end_s,
        wait_start_s=waits_s[:, 0] - update_end_s,
        wait_end_s=waits_s[:, 1] - update_end_s,
        lost_s=lost_s,
    )


def run_collectives(
    ready_s: NDArray[np.float64],
    needed_s: NDArray[np.float64],
    alone_s: NDArray[np.float64],
    idle: tuple[float, float],
    overlap: OverlapCost,
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[tuple[float, float]], float]:
    """Run collectives one after the other during compute.

    Args:
        ready_s, needed_s: when each may begin and when compute waits for it, on compute's clock without collectives.
        alone_s: seconds of each without compute.
        idle: from when to when nothing is computed, on that clock; it ends no later for what was lost before.

    Returns:
        Start and end of each, float64[n]; when compute waits for them; and the seconds that compute loses in all.
    """
    start_s, end_s = np.zeros(len(alone_s)), np.zeros(len(alone_s))
    waits: list[tuple[float, float]] = []
    # Who waits for a collective waits for those before it.
    wanted_s = np.minimum.accumulate(needed_s[::-1])[::-1].tolist()
    now_s = computed_s = 0.0  # time, and how far compute has come on its own clock
    for at, (ready, wanted, left_s) in enumerate(zip(ready_s.tolist(), wanted_s, alone_s.tolist(), strict=True)):
        if computed_s < ready:
            now_s, computed_s = now_s + ready - computed_s, ready
        start_s[at] = now_s
        while left_s > 0:
            if is_idle := idle[0] <= computed_s < idle[1]:
                computed_s = max(computed_s, min(now_s, idle[1]))
                is_idle = computed_s < idle[1]
            if computed_s >= wanted:
                waits.append((now_s, now_s + left_s))
                now_s, left_s = now_s + left_s, 0.0
                continue
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
    """Return when the first replica reads a unit's weights, by pipeline rank and unit; and when each rank's first
    forward begins, 0 without any, float64[ranks]."""
    layout = costs.layout
    needed_s: list[dict[int, float]] = [{} for _ in range(layout.pipeline_ranks)]
    first_s = np.full(layout.pipeline_ranks, np.inf)
    back_s, head = np.full(layout.pipeline_ranks, np.inf), 1 + costs.model.num_layers
    packs: dict[tuple[ReplicaPacks, int], int] = {}  # row of each
    firsts: dict[tuple[int, int], list[tuple[int, float, float]]] = {}  # by rank and stage: row, start, seconds
    for replica in replicas:
        actions, simulation = replica.actions, replica.simulation
        forwards = _first_places(actions, layout.num_stages)
        for rank, stage in np.argwhere(forwards >= 0).tolist():
            at = forwards[rank, stage]
            begin_s, seconds = float(simulation.start_s[at]), float(simulation.end_s[at] - simulation.start_s[at])
            first_s[rank] = min(first_s[rank], begin_s)
            row = packs.setdefault((replica.packs, int(actions.pack[at])), len(packs))
            firsts.setdefault((rank, stage), []).append((row, begin_s, seconds))
        back = actions.kind != KINDS.index("F")
        np.minimum.at(back_s, actions.rank[back], simulation.start_s[back])
    features = pack_features(costs, packs, "forward") if packs else np.empty((0, 0))
    for (rank, stage), found in firsts.items():
        rows, begin_s, seconds = map(list, zip(*found, strict=True))
        inside_s = unit_shares(costs, features[rows], stage, "forward") * np.array(seconds)[:, None]
        units_s = (np.array(begin_s)[:, None] + inside_s).min(axis=0).tolist()
        needed_s[rank] |= zip(stage_units(costs, stage, "forward"), units_s, strict=True)
    # A rank's first backward, which may read the head, needs all its weights.
    for rank in np.flatnonzero(np.isfinite(back_s)).tolist():
        needed_s[rank][head] = float(back_s[rank])
    return needed_s, np.where(np.isfinite(first_s), first_s, 0.0)


def _first_places(actions: ActionColumns, num_stages: int) -> NDArray[np.int64]:
    """Return the first forward by rank and stage, -1 = none; int64[ranks, stages]."""
    places = np.full((actions.num_ranks, num_stages), -1, np.int64)
    at = np.flatnonzero(actions.kind == KINDS.index("F"))[::-1]
    places[actions.rank[at], actions.stage[at]] = at  # of several the first
    return places


@dataclass(frozen=True, eq=False)
class RankReductions:
    """Reduce-scatters of the gradients of one pipeline rank, unit by unit, float64[n]; when the last replica has
    computed its last pack there; and the seconds that compute loses in each second of a reduction."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    compute_end_s: float
    slowdown: float

    @property
    def seconds(self) -> float:
        """Seconds in which a reduction runs."""
        return float((self.end_s - self.start_s).sum())

    @property
    def hidden_s(self) -> float:
        """Those of `seconds` during compute."""
        early = np.minimum(self.end_s, self.compute_end_s) - np.minimum(self.start_s, self.compute_end_s)
        return float(early.sum())

    def overlapped(self, computed_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when compute has come as far as it would have at these times without reductions; float64[n]."""
        reductions_s = np.minimum(np.stack([self.start_s, self.end_s], axis=1).ravel(), self.compute_end_s)
        edges_s = np.concatenate([[0.0], reductions_s, [self.compute_end_s]])
        # Reductions run one after the other: every second step from edge to edge is one of them.
        lost_s = np.diff(edges_s) * np.resize([0.0, self.slowdown], len(edges_s) - 1)
        return np.interp(computed_s, edges_s - np.concatenate([[0.0], np.cumsum(lost_s)]), edges_s)


@dataclass(frozen=True, eq=False)
class StepEnd:
    """The end of a step.

    Args:
        reductions: reductions of every pipeline rank.
        gathers: of the update before the step, of every pipeline rank; none where weights are gathered at the end of a
            step.
        replicas: with what first forwards lose to these gathers; reductions delay nothing here.
        packs_s: end of the last pack without collectives.
        summed_s: end of the last reduction; updated_s: of the update; end_s: of the step, with exposed gathers.
    """

    reductions: tuple[RankReductions, ...]
    gathers: tuple[RankGathers, ...]
    replicas: tuple[SimulatedReplica, ...]
    packs_s: float
    summed_s: float
    updated_s: float
    end_s: float

    def collective_seconds(self) -> dict[str, float]:
        """Return the fields of `Prediction` about reductions and gathers, means over pipeline ranks."""
        parts = {"reduction": self.reductions, "gather": self.gathers}
        sums = {f"{name}_s": sum(one.seconds for one in ranks) for name, ranks in parts.items()}
        sums |= {f"{name}_hidden_s": sum(one.hidden_s for one in ranks) for name, ranks in parts.items()}
        means = {name: seconds / len(self.reductions) for name, seconds in sums.items()}
        return means if self.gathers else means | {"gather_s": self.end_s - self.updated_s}


def step_end(costs: PackCosts, replicas: Sequence[SimulatedReplica]) -> StepEnd:
    return _step_end(costs, tuple(replicas))


@functools.lru_cache(maxsize=1)  # a plan is sealed with the end by which it was chosen
def _step_end(costs: PackCosts, replicas: Sequence[SimulatedReplica]) -> StepEnd:
    packs_s = max(replica.simulation.makespan_s for replica in replicas)
    gathers = _first_gathers(costs, replicas)
    if gathers:
        replicas = [_delayed(replica, gathers) for replica in replicas]
    overlap = costs.coefficients.reduction_overlap
    completed_s = _completed_seconds(costs, replicas)
    ends_s = np.zeros(costs.layout.pipeline_ranks)
    for replica in replicas:
        np.maximum.at(ends_s, replica.actions.rank, replica.simulation.end_s)
    ranks = range(costs.layout.pipeline_ranks)
    reductions = tuple(_rank_reductions(costs, overlap, completed_s, ends_s, rank) for rank in ranks)
    packs_end_s = max(replica.simulation.makespan_s for replica in replicas)
    summed_s = max(packs_end_s, *(max(one.compute_end_s, *one.end_s.tolist()) for one in reductions))
    updated_s = summed_s + costs.optimizer_seconds()
    of_ranks = (unit_transfers(costs.model, costs.coefficients, costs.layout, rank) for rank in ranks)
    exposed_s = 0.0 if gathers else max(float(one.gather_s.sum()) for one in of_ranks)
    return StepEnd(reductions, gathers, tuple(replicas), packs_s, summed_s, updated_s, updated_s + exposed_s)


def _rank_reductions(
    costs: PackCosts,
    overlap: OverlapCost | None,
    completed_s: dict[tuple[int, int], float],
    ends_s: NDArray[np.float64],
    rank: int,
) -> RankReductions:
    """Time the reductions over all ranks that hold the layers of one; `completed_s` by rank and unit."""
    layout = costs.layout
    transfers = unit_transfers(costs.model, costs.coefficients, layout, rank)
    units, alone_s = transfers.unit[::-1], transfers.sum_s[::-1]
    twins = [twin for twin, leading in enumerate(layout.leading_ranks) if leading == layout.leading_ranks[rank]]
    compute_end_s = float(ends_s[twins].max())
    released_s = [max(completed_s.get((twin, unit), 0.0) for twin in twins) for unit in units.tolist()]
    released = np.array(released_s) if overlap else np.full(len(units), compute_end_s)
    return run_reductions(released, alone_s, compute_end_s, overlap or OverlapCost(compute_slowdown=0.0))


def run_reductions(
    released_s: NDArray[np.float64], alone_s: NDArray[np.float64], compute_end_s: float, overlap: OverlapCost
) -> RankReductions:
    """Run reductions as `run_collectives`; `compute_end_s` is when compute would end without them."""
    never, idle = np.full(len(alone_s), np.inf), (compute_end_s, float("inf"))
    start_s, end_s, _, _ = run_collectives(released_s, never, alone_s, idle, overlap)
    slowdown = overlap.compute_slowdown
    for start, end in zip(start_s.tolist(), end_s.tolist(), strict=True):
        if start < compute_end_s:
            outlasted_s = start + (compute_end_s - start) / (1 - slowdown) if slowdown < 1 else float("inf")
            compute_end_s = min(compute_end_s + slowdown * (end - start), outlasted_s)
    return RankReductions(start_s, end_s, compute_end_s, slowdown)


def _completed_seconds(costs: PackCosts, replicas: Sequence[SimulatedReplica]) -> dict[tuple[int, int], float]:
    ranks = [one.packs.backward.pack_ranks() for one in replicas]
    least = [max(1, int(of_packs.min()) // costs.layout.cp) if len(of_packs) else 1 for of_packs in ranks]
    places = [
        _completing_places(costs, replica, replicas_alike(least, dp_rank)) for dp_rank, replica in enumerate(replicas)
    ]
    packs: dict[tuple[ReplicaPacks, int], int] = {}  # row of each
    for replica, (place, _) in zip(replicas, places, strict=True):
        for pack in np.unique(replica.actions.pack[place[place >= 0]]).tolist():
            packs.setdefault((replica.packs, pack), len(packs))
    if not packs:
        return {}
    features = pack_features(costs, packs, "backward")
    completed_s: dict[tuple[int, int], float] = {}
    for rank in range(costs.layout.pipeline_ranks):
        for stage in costs.layout.stages_of_rank(rank):
            rows, end_s, inside_s = [], [], []
            for replica, (place, is_whole) in zip(replicas, places, strict=True):
                if (at := int(place[rank, stage])) < 0:
                    continue
                rows.append(packs[replica.packs, int(replica.actions.pack[at])])
                end_s.append(float(replica.simulation.end_s[at]))
                # As in the executor, a whole backward that completes one stage completes it unit by unit.
                inside_s.append(end_s[-1] - float(replica.simulation.start_s[at]) if is_whole[rank, stage] else 0.0)
            if rows:
                left = unit_shares(costs, features[rows], stage, "backward")
                units_s = (np.array(end_s)[:, None] - left * np.array(inside_s)[:, None]).max(axis=0)
                completed_s |= {(rank, u): s for u, s in zip(stage_units(costs, stage), units_s.tolist(), strict=True)}
    return completed_s


def _completing_places(
    costs: PackCosts, replica: SimulatedReplica, alike: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return which action completes a stage's gradients, -1 = none, and whether units may be reduced within it, because
    it is a whole backward, by rank and stage, as `types.plan.completing_actions`; int64 and bool [ranks, stages].
    `alike` as `replicas_alike`."""
    actions, shape = replica.actions, (costs.layout.pipeline_ranks, costs.layout.num_stages)
    place = np.full(shape, -1, np.int64)
    at = np.flatnonzero(actions.kind != KINDS.index("F"))
    place[actions.rank[at], actions.stage[at]] = at  # of several the last
    own = place >= 0
    is_whole = np.zeros(shape, bool)
    is_whole[own] = actions.kind[place[own]] == KINDS.index("B")
    with_weights = actions.rank[actions.kind == KINDS.index("W")]
    for rank in np.unique(with_weights).tolist():
        if own[rank].sum() > 1:
            place[rank, own[rank]], is_whole[rank] = place[rank].max(), False
    sizes = [side.pack_ranks() // costs.layout.cp for side in (replica.packs.forward, replica.packs.backward)]
    before = num_before_sums(actions, sizes, alike, replica.simulation.end_s)
    last = (actions.rank_offset[:-1] + before - 1)[:, None]
    return np.where(own, np.maximum(place, last), -1), is_whole & (place > last)


def replicas_alike(least: Sequence[int], dp_rank: int) -> int:
    """Return how many replicas a replica runs all its last packs with, as one replica's context ranks do: those of its
    smallest block, where none of them has packs in a smaller one; `least` is the size of every replica's smallest."""
    size = least[dp_rank]
    first = dp_rank // size * size
    return size if min(least[first : first + size]) == size else 1


def num_before_sums(
    actions: ActionColumns, replicas: Sequence[NDArray[np.int64]], alike: int, end_s: NDArray[np.number]
) -> NDArray[np.int64]:
    """Return how many of its actions each pipeline rank of a replica runs before it may reduce gradients: those that
    end no later than the last in which it meets replicas that go on without it; int64[R].

    Args:
        replicas: how many share each forward pack, and each backward pack; alike: as `replicas_alike`.
        end_s: float64[n], or the places of actions in an order that follows all waits.
    """
    forward, backward = replicas
    if not (forward > alike).any():
        return np.zeros(actions.num_ranks, np.int64)
    is_forward, is_weight = (actions.kind == KINDS.index(kind) for kind in "FW")
    sides = (is_forward, forward), (~(is_forward | is_weight), backward)
    # A plan that only evaluates has no backwards.
    last = max(end_s[at][of_pack[actions.pack[at]] > alike].max(initial=0) for at, of_pack in sides)
    rows = (end_s[actions.of_rank(rank)] for rank in range(actions.num_ranks))
    return np.array([np.searchsorted(row, last, side="right") for row in rows], np.int64)
