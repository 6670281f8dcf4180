"""`with_halves`: a candidate whose packs are computed in halves where that is shorter (`cost.tensor_halves`).

Searches compare packings by packs in one go; halves are chosen where candidates of different kinds are compared, and
for the plan that runs. Which packs are halved changes no order and no memory that packs keep.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.group_comm import weight_gather_seconds
from evenload.cost.pack_cost import PackCosts
from evenload.cost.tensor_halves import halved_packs, pays
from evenload.plan.problem.candidate import Candidate
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.simulate.simulate import simulate


def with_halves(costs: PackCosts, found: Candidate) -> Candidate:
    """The same order of the same packs, simulated with halves; the candidate itself where none are worth it, also
    because a stage of few layers gets slower by them and holds up the others.

    Args:
        costs: of packs that a replica runs alone.
    """
    if not pays(costs):
        return found
    forward = halved_packs(costs, found.forward, "forward", found.policy)
    backward = halved_packs(costs, found.backward, "backward", found.policy)
    if not (forward.first_rows.any() or backward.first_rows.any()):
        return found
    tasks, split = found.tasks, found.tasks.split
    if split is not None:
        split = replace(
            split,
            input_s=split.input_s + backward.more_s,
            weight_s=split.weight_s + gathered_again_s(costs, backward.first_rows),
        )
    tasks = replace(
        tasks,
        forward_s=tasks.forward_s + forward.more_s,
        backward_s=tasks.backward_s + backward.more_s,
        split=split,
    )
    first_rows = forward.first_rows, backward.first_rows
    simulation = simulate(tasks, found.actions)
    if simulation.makespan_s >= found.makespan_s:
        return found
    return replace(found, tasks=tasks, simulation=simulation, first_rows=first_rows)


def halves_seconds(problem: StepProblem, choices: Sequence[ReplicaChoice]) -> tuple[float, float]:
    """Transfers of packs in halves, and of these beside compute; means over pipeline ranks of all replicas."""
    transfer_s = hidden_s = 0.0
    for dp_rank, choice in enumerate(choices):
        found = choice.candidate
        if found.first_rows is None:
            continue
        costs = problem.of_replica(dp_rank).costs
        forward = halved_packs(costs, found.forward, "forward", found.policy, found.first_rows[0])
        backward = halved_packs(costs, found.backward, "backward", found.policy, found.first_rows[1])
        transfer_s += float(forward.transfer_s.sum() + backward.transfer_s.sum())
        hidden_s += float(forward.hidden_s.sum() + backward.hidden_s.sum())
    ranks = len(choices) * problem.costs.layout.pipeline_ranks
    return transfer_s / ranks, hidden_s / ranks


def gathered_again_s(costs: PackCosts, first_rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """What W of halved backwards takes beyond that of whole ones: as many transfers again; float64[num_packs, P]."""
    _, pack_s = weight_gather_seconds(costs.model, costs.coefficients, costs.layout.tp)
    return np.outer(first_rows > 0, pack_s * costs.layers())
