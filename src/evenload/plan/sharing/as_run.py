"""`as_run`: a candidate with the seconds that its ranks will take, once it is known who computes what.

Searches compare thousands of packings by the mean over the ranks that share a pack; what runs waits for the slowest.
So before candidates of different kinds are compared, and before a plan promises a time, shared packs are given their
sharding and priced rank by rank (`cost.ranked_packs`), and the pipeline is simulated again in the same order of
actions. Bytes stay as they are: `cost.memory` charges the fullest rank. Some numpy calls a replica, about 2 ms for 512
documents; nothing where no rank shares anything.
"""

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.cost.ranked_packs import RankedPacks, rank_seconds
from evenload.cost.split_backward import gather_seconds, weight_seconds
from evenload.plan.problem.candidate import Candidate
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.sharing.cp_sharding import pack_shardings
from evenload.plan.sharing.sharding_cost import sharding_cost
from evenload.simulate.simulate import simulate
from evenload.stepplan.ranked_packs import ranked_where_shared
from evenload.types.pipeline import PipelineTasks, SplitBackward


def choices_as_run(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> tuple[ReplicaChoice, ...]:
    """The same choices with candidates as they run."""
    return tuple(replace(choice, candidate=as_run(problem, choice.candidate)) for choice in choices)


def as_run(problem: StepProblem, found: Candidate) -> Candidate:
    """The candidate with shardings, its slowest ranks' seconds and their simulation; itself where it has them."""
    if found.shardings is not None:
        return found
    costs = problem.costs
    rule, price = problem.options.cp_sharding, functools.partial(sharding_cost, costs)
    found = replace(found, shardings=pack_shardings(rule, found.forward, found.backward, price))
    assert found.shardings is not None
    forward, backward = ranked_where_shared(costs, found.forward, found.backward, found.shardings)
    if forward is None or backward is None:
        return found
    tasks = replace(found.tasks, forward_s=forward.slowest(rank_seconds(costs, forward, "forward", found.policy)))
    tasks = with_slowest_backward(costs, tasks, backward, found.policy)
    simulation = simulate(tasks, found.actions)
    cap_bytes = problem.cap_bytes
    excess = 0 if cap_bytes is None else max(0, int((simulation.peak_bytes - cap_bytes).max()))
    return replace(found, tasks=tasks, simulation=simulation, excess_bytes=excess)


def with_slowest_backward(
    costs: PackCosts, tasks: PipelineTasks, backward: RankedPacks, policy: NDArray[np.int8] | None
) -> PipelineTasks:
    """Backwards as their slowest ranks take them; where they are split, I and W are that rank's."""
    rank_s = rank_seconds(costs, backward, "backward", policy)
    whole_s = backward.slowest(rank_s)
    if tasks.split is None:
        return replace(tasks, backward_s=whole_s)
    model, coefficients, layout = costs.model, costs.coefficients, costs.layout
    copy_s = None if policy is None else costs.copy_seconds(backward.rows, policy)
    tokens = backward.rows.rank_tokens()
    weight_s = weight_seconds(model, coefficients, layout, tokens, rank_s, copy_s)
    of_slowest = np.where(rank_s == np.repeat(whole_s, backward.num_ranks(), axis=0), weight_s, 0.0)
    weight_s = backward.slowest(of_slowest)
    gather_s = backward.slowest(gather_seconds(model, coefficients, layout, backward.rows))
    split: SplitBackward = replace(tasks.split, input_s=whole_s - weight_s, weight_s=weight_s + gather_s)
    return replace(tasks, backward_s=whole_s, split=split)
