"""What follows a step's packs: gradients summed unit by unit, partly beside them, then the update, then the gather.

All ranks that hold the same units sum them in one order, from the head down to the embedding, each as soon as the last
of the replicas has completed it and the sum before it is done (`runtime.optim.data_parallel`). Times follow two clocks:
while a sum runs beside compute it takes `stretch` times its seconds, and compute goes on at the rate 1 - `slowdown`
(`cost.coefficients.BesideCompute`), which puts off what it has yet to complete. After compute a sum takes its seconds
alone. The norm needs the sums of all ranks, the update the norm.

What is left out: a rank whose last backward becomes slower lets the stage before it wait longer; a sum slows compute
also where the rank would have waited. The plain account that it is tested against is in tests/simulate.

Price: O(ranks · (actions + units)), once for a chosen plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import BesideCompute
from evenload.cost.last_backward import pack_features, shares_left
from evenload.cost.memory import trained_unit_parameters
from evenload.cost.pack_cost import PackCosts
from evenload.simulate.simulate import Simulation
from evenload.types.columns import SliceColumns
from evenload.types.pipeline import ActionColumns
from evenload.types.schedule import completing_actions
from evenload.types.timeline import KINDS


@dataclass(frozen=True, eq=False)
class SimulatedReplica:
    """One replica's backward packs, their order and when they run."""

    backward: SliceColumns
    actions: ActionColumns
    simulation: Simulation


@dataclass(frozen=True, eq=False)
class RankSums:
    """The sums of the units of one pipeline rank, over all that hold them.

    Args:
        unit: int64[n], in their order; start_s, end_s: float64[n].
        compute_end_s: when the last of the replicas has computed its last pack here.
    """

    unit: NDArray[np.int64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    compute_end_s: float

    @property
    def seconds(self) -> float:
        """In which a sum runs."""
        return float((self.end_s - self.start_s).sum())

    @property
    def hidden_s(self) -> float:
        """Of these, beside compute."""
        early = np.minimum(self.end_s, self.compute_end_s) - np.minimum(self.start_s, self.compute_end_s)
        return float(early.sum())


@dataclass(frozen=True, eq=False)
class StepEnd:
    """The end of a step.

    Args:
        sums: of every pipeline rank.
        packs_s: end of the last pack, were there no sums beside it.
        summed_s: end of the last sum; updated_s: of the update; end_s: of the gather, which is the step's.
    """

    sums: tuple[RankSums, ...]
    packs_s: float
    summed_s: float
    updated_s: float
    end_s: float

    @property
    def reduction_s(self) -> float:
        """In which a sum of gradients runs, mean over pipeline ranks."""
        return sum(one.seconds for one in self.sums) / len(self.sums)

    @property
    def reduction_hidden_s(self) -> float:
        """Of these, beside compute."""
        return sum(one.hidden_s for one in self.sums) / len(self.sums)


def step_end(costs: PackCosts, replicas: Sequence[SimulatedReplica]) -> StepEnd:
    """Of all replicas of a step together."""
    known: dict[tuple[int, int], list[float]] = {}
    sums = tuple(_rank_sums(costs, replicas, rank, known) for rank in range(costs.layout.pipeline_ranks))
    packs_s = max(replica.simulation.makespan_s for replica in replicas)
    summed_s = max(packs_s, *(max(one.compute_end_s, *one.end_s.tolist()) for one in sums))
    updated_s = summed_s + costs.optimizer_seconds()
    return StepEnd(sums, packs_s, summed_s, updated_s, updated_s + costs.gather_seconds())


def _rank_sums(
    costs: PackCosts, replicas: Sequence[SimulatedReplica], rank: int, known: dict[tuple[int, int], list[float]]
) -> RankSums:
    """`known` are features of packs by (replica, pack); they grow."""
    layout = costs.layout
    parameters = trained_unit_parameters(costs.model, layout, rank)
    units = sorted(parameters, reverse=True)
    leading = layout.leading_ranks[rank]
    twins = [twin for twin in range(layout.pipeline_ranks) if layout.leading_ranks[twin] == leading]
    completed_s = dict.fromkeys(units, 0.0)
    compute_end_s = 0.0
    for number, replica in enumerate(replicas):
        for twin in twins:
            own_s, end_s = _completed_seconds(costs, replica, twin, number, known)
            compute_end_s = max(compute_end_s, end_s)
            for unit, seconds in own_s.items():
                if unit in completed_s:
                    completed_s[unit] = max(completed_s[unit], seconds)
    sizes = np.array([parameters[unit] for unit in units], np.float64)
    # Together as long as one sum of all their bytes: latency is counted once.
    num_bytes = max(costs.model.bytes_per_element, 4) * float(sizes.sum())
    alone_s = costs.coefficients.ring_seconds(num_bytes, layout.data_sizes[rank]) * sizes / max(1.0, sizes.sum())
    beside = costs.coefficients.reduction_beside
    released_s = np.array([completed_s[unit] if beside else compute_end_s for unit in units])
    start_s, end_s, compute_end_s = run_sums(released_s, alone_s, compute_end_s, beside or BesideCompute())
    return RankSums(np.array(units, np.int64), start_s, end_s, compute_end_s)


def _completed_seconds(
    costs: PackCosts, replica: SimulatedReplica, rank: int, number: int, known: dict[tuple[int, int], list[float]]
) -> tuple[dict[int, float], float]:
    """When a rank has completed the gradients of its units, and its last action; nothing of a rank without packs."""
    actions, own = replica.actions, replica.actions.of_rank(rank)
    ends_s = replica.simulation.end_s[own]
    if not len(ends_s):
        return {}, 0.0
    found: dict[int, float] = {}
    kind, stage_of = actions.kind[own], actions.stage[own]
    # All others add nothing to the answer: the last action of every stage, and one W if there is one.
    told = [int(np.flatnonzero(kind == KINDS.index("W"))[-1])] if (kind == KINDS.index("W")).any() else []
    for stage in costs.layout.stages_of_rank(rank):
        told += np.flatnonzero((stage_of == stage) & (kind != KINDS.index("F")))[-1:].tolist()
    told = sorted(set(told))
    pairs = [(KINDS[kind[at]], int(stage_of[at])) for at in told]
    for index, completing in completing_actions(pairs).items():
        place = own.start + told[index]
        pack = int(actions.pack[place])
        start_s, end_s = float(replica.simulation.start_s[place]), float(replica.simulation.end_s[place])
        for stage in completing:
            # Told unit by unit where one whole backward completes one stage, as the executor does.
            is_whole = pairs[index][0] == "B" and completing == (pairs[index][1],)
            if (number, pack) not in known:
                known[number, pack] = pack_features(costs, replica.backward, pack)
            left = shares_left(costs, known[number, pack], stage)
            found |= {unit: end_s - (share if is_whole else 0.0) * (end_s - start_s) for unit, share in left.items()}
    return found, float(ends_s[-1])


def run_sums(
    released_s: NDArray[np.float64], alone_s: NDArray[np.float64], compute_end_s: float, beside: BesideCompute
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Start and end of every sum, in their order, float64[n] each, and when compute ends with them beside it.

    Args:
        released_s, compute_end_s: were nothing beside compute; alone_s: were no compute beside the sums.
    """
    start_s, end_s = np.zeros(len(alone_s)), np.zeros(len(alone_s))
    rate = 1 - beside.slowdown
    now_s = computed_s = 0.0  # time, and how far compute has come on its own clock
    ended_s = None
    for at, (released, left_s) in enumerate(zip(released_s.tolist(), alone_s.tolist(), strict=True)):
        if computed_s < released:
            now_s, computed_s = now_s + released - computed_s, released
        start_s[at] = now_s
        if computed_s < compute_end_s:
            to_end_s = (compute_end_s - computed_s) / rate if rate else float("inf")
            whole_s = left_s * beside.stretch
            if whole_s < to_end_s:
                now_s, computed_s, left_s = now_s + whole_s, computed_s + whole_s * rate, 0.0
            else:
                now_s, computed_s, left_s = now_s + to_end_s, compute_end_s, left_s - to_end_s / beside.stretch
                ended_s = now_s
        elif ended_s is None:
            ended_s = now_s
        now_s += left_s
        end_s[at] = now_s
    if ended_s is None:
        ended_s = now_s + compute_end_s - computed_s
    return start_s, end_s, ended_s
