"""`as_run`: a candidate with the seconds that its ranks will take, once it is known who computes what.

Searches compare thousands of packings by the mean over the ranks that share a pack; what runs waits for the slowest.
So before candidates of different kinds are compared, and before a plan promises a time, shared packs are given their
sharding and priced rank by rank (`cost.ranked_packs`), and the pipeline is simulated again in the same order of
actions; only what follows packs that replicas share moves into the gaps that they leave (`plan.sharing.phase_overlap`).
Bytes stay as they are: `cost.memory` charges the fullest rank. Some numpy calls a replica, about 2 ms for 512
documents; nothing where no rank shares anything.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.cost.ranked_packs import RankedPacks, TravellingParts, rank_seconds, travelling_parts
from evenload.cost.split_backward import gather_seconds, weight_seconds
from evenload.plan.problem.candidate import Candidate, in_order
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.sharing.cp_sharding import pack_shardings
from evenload.plan.sharing.halved import with_halves
from evenload.plan.sharing.phase_overlap import run_ahead
from evenload.plan.sharing.sharding_cost import sharding_cost
from evenload.stepplan.ranked_packs import ranked_where_shared
from evenload.types.micropack import Direction
from evenload.types.pipeline import PipelineTasks, SplitBackward
from evenload.types.replica_block import ReplicaBlock

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def choices_as_run(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> tuple[ReplicaChoice, ...]:
    """The same choices with candidates as they run."""
    return tuple(
        replace(choice, candidate=as_run(problem, choice.candidate, dp_rank)) for dp_rank, choice in enumerate(choices)
    )


def as_run(problem: StepProblem, found: Candidate, dp_rank: int) -> Candidate:
    """The candidate of a replica with shardings, halves, its slowest ranks' seconds and their simulation; itself where
    it has them."""
    if found.shardings is not None:
        return found
    return with_halves(problem, _as_shared(problem, found, dp_rank), dp_rank)


def _as_shared(problem: StepProblem, found: Candidate, dp_rank: int) -> Candidate:
    costs = problem.costs
    rule, price = problem.options.cp_sharding, functools.partial(sharding_cost, costs)
    found = replace(found, shardings=pack_shardings(rule, found.forward, found.backward, price))
    assert found.shardings is not None
    forward, backward = ranked_where_shared(costs, found.forward, found.backward, found.shardings)
    if forward is None or backward is None:
        return found
    tasks = found.tasks
    travelling: tuple[list[TravellingParts], list[TravellingParts]] = [], []
    # Where ranks differ in speed, packs that replicas share have other costs than those a replica runs alone.
    for num_ranks in np.unique(np.concatenate([forward.num_ranks(), backward.num_ranks()])).tolist():
        size = max(1, num_ranks // costs.layout.cp)
        of_block = problem.of_block(ReplicaBlock(dp_rank // size * size, size)).costs
        forward_s = forward.slowest(rank_seconds(of_block, forward, "forward", found.policy))
        priced = with_slowest_backward(of_block, replace(tasks, forward_s=forward_s), backward, found.policy)
        of_size = forward.num_ranks() == num_ranks, backward.num_ranks() == num_ranks
        tasks = _with_rows(tasks, priced, *of_size)
        for mine, ranked, direction, chosen in zip(travelling, (forward, backward), DIRECTIONS, of_size, strict=True):
            mine.append(travelling_parts(of_block, ranked, direction).only(chosen))
    actions = found.actions
    of_forward, of_backward = _phases(costs.layout.cp, forward), _phases(costs.layout.cp, backward)
    if of_forward.any() and costs.layout.pp > 1:
        actions = run_ahead(tasks, actions, of_forward, of_backward, problem.cap_bytes)
    found = in_order(found, actions, problem.cap_bytes, tasks=tasks)
    return with_parts(found, *travelling) if travelling[0] else found  # an idle replica has no packs


def with_parts(found: Candidate, forward: Sequence[TravellingParts], backward: Sequence[TravellingParts]) -> Candidate:
    """The candidate with how keys and values of its packs travel: every pack's is one of those of its direction, and 1
    part in the others."""
    parts = tuple(tuple(np.max([one.parts for one in side], axis=0).tolist()) for side in (forward, backward))
    beside_s, hidden_s = (
        sum(float(getattr(one, name).sum()) for one in (*forward, *backward)) for name in ("beside_s", "hidden_s")
    )
    return replace(found, context_parts=parts, context_s=(beside_s, hidden_s))


def _phases(cp: int, ranked: RankedPacks) -> NDArray[np.int64]:
    """Of every pack which phase it belongs to, 0 = that of the largest blocks; every phase has packs of both
    directions."""
    sizes = np.maximum(1, ranked.num_ranks() // cp)
    return np.searchsorted(np.unique(-sizes), -sizes)


def _with_rows(
    tasks: PipelineTasks, other: PipelineTasks, forward: NDArray[np.bool_], backward: NDArray[np.bool_]
) -> PipelineTasks:
    """With the seconds of some forward and backward packs from other tasks of the same packs."""

    def chosen(mine: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(backward[:, None], others, mine)

    split = tasks.split
    if split is not None and other.split is not None:
        split = replace(
            split,
            input_s=chosen(split.input_s, other.split.input_s),
            weight_s=chosen(split.weight_s, other.split.weight_s),
        )
    return replace(
        tasks,
        forward_s=np.where(forward[:, None], other.forward_s, tasks.forward_s),
        backward_s=chosen(tasks.backward_s, other.backward_s),
        split=split,
    )


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
