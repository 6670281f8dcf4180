"""`as_run`: a candidate with the seconds that its ranks will take, once it is known who computes what.

Searches compare thousands of packings by the mean over the ranks that share a pack; what runs waits for the slowest.
So before candidates of different kinds are compared, and before a plan promises a time, shared packs are given their
sharding and priced rank by rank (`cost.ranked_packs`), and the pipeline is simulated again in the same order of
actions; only what follows packs that replicas share moves into the gaps that they leave (`plan.sharing.phase_overlap`).
Bytes stay as they are: `cost.memory` charges the fullest rank. Some numpy calls a replica, about 2 ms for 512
documents; nothing where no rank shares anything.
"""

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.cost.ranked_packs import RankedPacks, rank_seconds, travelling_parts
from evenload.cost.split_backward import gather_seconds, weight_seconds
from evenload.plan.problem.candidate import Candidate, in_order
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.sharing.cp_sharding import pack_shardings
from evenload.plan.sharing.halved import with_halves
from evenload.plan.sharing.phase_overlap import run_ahead
from evenload.plan.sharing.sharding_cost import sharding_cost
from evenload.stepplan.ranked_packs import ranked_where_shared
from evenload.types.pipeline import PipelineTasks, SplitBackward


def choices_as_run(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> tuple[ReplicaChoice, ...]:
    """The same choices with candidates as they run."""
    return tuple(replace(choice, candidate=as_run(problem, choice.candidate)) for choice in choices)


def as_run(problem: StepProblem, found: Candidate) -> Candidate:
    """The candidate of a replica with shardings, halves, its slowest ranks' seconds and their simulation; itself where
    it has them."""
    if found.shardings is not None:
        return found
    return with_halves(problem.costs, _as_shared(problem, found))


def _as_shared(problem: StepProblem, found: Candidate) -> Candidate:
    costs = problem.costs
    rule, price = problem.options.cp_sharding, functools.partial(sharding_cost, costs)
    found = replace(found, shardings=pack_shardings(rule, found.forward, found.backward, price))
    assert found.shardings is not None
    forward, backward = ranked_where_shared(costs, found.forward, found.backward, found.shardings)
    if forward is None or backward is None or not found.forward.num_packs:  # an idle replica has no packs
        return found
    forward_s = forward.slowest(rank_seconds(costs, forward, "forward", found.policy))
    tasks = with_slowest_backward(costs, replace(found.tasks, forward_s=forward_s), backward, found.policy)
    actions = found.actions
    of_forward, of_backward = _phases(costs.layout.cp, forward), _phases(costs.layout.cp, backward)
    if of_forward.any() and costs.layout.pp > 1:
        actions = run_ahead(tasks, actions, of_forward, of_backward, problem.cap_bytes)
    found = in_order(found, actions, problem.cap_bytes, tasks=tasks)
    return with_parts(costs, found, forward, backward)


def with_parts(costs: PackCosts, found: Candidate, forward: RankedPacks, backward: RankedPacks) -> Candidate:
    """The candidate with how keys and values of its packs travel."""
    one, other = travelling_parts(costs, forward, "forward"), travelling_parts(costs, backward, "backward")
    return replace(
        found,
        context_parts=(tuple(one.parts.tolist()), tuple(other.parts.tolist())),
        context_s=(
            float(one.beside_s.sum()) + float(other.beside_s.sum()),
            float(one.hidden_s.sum()) + float(other.hidden_s.sum()),
        ),
    )


def _phases(cp: int, ranked: RankedPacks) -> NDArray[np.int64]:
    """Of every pack which phase it belongs to, 0 = that of the largest blocks; every phase has packs of both
    directions."""
    sizes = np.maximum(1, ranked.num_ranks() // cp)
    return np.searchsorted(np.unique(-sizes), -sizes)


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
