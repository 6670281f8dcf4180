"""`balanced`: whole documents in micro-batches of equal predicted time, with a token limit; 1F1B.

What verl, slime and prime-rl do, with the limit that they do not all keep: documents go to replicas by LPT on
forward + backward time, then to micro-batches of their replica the same way. The number of micro-batches is a
multiple of pp; of a few multiples (powers of two from the least that the token limit allows) the fastest by
simulation within memory is kept. O(candidates · n log n). A document longer than a fair share stays whole and
makes its micro-batch late: what slicing cures.

`options.micro_batches` fixes their number instead. Then the token limit binds first: replicas get no more tokens than
their micro-batches hold, and where LPT by time opens more of them, best fit by tokens packs them as tightly as can be.
More than asked for come back where that is not enough; who asked decides.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.plan.packing.bin_packing import assign_replicas, best_fit_decreasing, longest_first
from evenload.plan.packing.pack_counts import pack_counts
from evenload.plan.problem.candidate import Candidate, scheduled_candidate
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.strategies.strategy import Strategy
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.types.columns import whole_document_columns
from evenload.types.counted import counted

ENOUGH_WORSE = 2
"""Larger numbers of micro-batches are not tried after so many in a row that were no better: fill and drain fall with
their number, constants rise with it."""


def plan_balanced(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    replicas = _replicas_with_room(problem) or assign_replicas(problem.document_s, problem.layout.dp)
    return tuple(ReplicaChoice(documents, _best(problem, documents)) for documents in replicas)


def _replicas_with_room(problem: StepProblem) -> list[NDArray[np.int64]] | None:
    """As `assign_replicas`, with no more tokens each than a fixed number of micro-batches holds; None where that
    number is free, or nothing fits so."""
    options, dp = problem.options, problem.layout.dp
    if options.micro_batches is None or options.max_pack_tokens is None:
        return None
    capacity = options.micro_batches * options.max_pack_tokens
    groups = longest_first(problem.document_s, dp, num_tokens=problem.num_tokens, capacity=capacity)
    return [np.sort(np.array(group, dtype=np.int64)) for group in groups] if len(groups) <= dp else None


def _best(problem: StepProblem, documents: NDArray[np.int64]) -> Candidate:
    options, pp = problem.options, problem.layout.pipeline_ranks
    policy, rule = problem.policy_of(documents), options.rule(ONE_F_ONE_B)
    num_tokens, work_s = problem.num_tokens[documents], problem.document_s[documents]
    found: list[Candidate] = []
    worse = 0
    counts = pack_counts(int(num_tokens.sum()), pp, options.candidates, options.max_pack_tokens)
    if options.micro_batches is not None:
        counts = [options.micro_batches]
    for count in counts:
        if found and count > len(documents):
            break  # more micro-batches than documents change nothing
        groups = _groups(work_s, num_tokens, count, pp, options.max_pack_tokens)
        if options.micro_batches is not None and options.max_pack_tokens is not None and len(groups) > count:
            tight = best_fit_decreasing(num_tokens, options.max_pack_tokens)
            groups = min(groups, tight, key=len)
        columns = whole_document_columns(groups, num_tokens, problem.layout.cp)
        label = counted(len(groups), "pack")
        tasks = pipeline_tasks(problem.costs, columns, columns, num_tokens, policy, split=rule.splits_backward)
        tried = scheduled_candidate(label, columns, columns, tasks, rule, problem.cap_bytes, policy)
        worse = worse + 1 if found and min(found, key=Candidate.score).score() <= tried.score() else 0
        found.append(tried)
        if worse == ENOUGH_WORSE:
            break
    return min(found, key=Candidate.score)


def _groups(
    work_s: NDArray[np.float64],
    num_tokens: NDArray[np.int64],
    count: int,
    pp: int,
    max_pack_tokens: int | None,
) -> list[list[int]]:
    """Non-empty LPT groups; the token limit may need more than asked, then the next multiple of pp is balanced."""
    tokens = None if max_pack_tokens is None else num_tokens
    while True:
        groups = longest_first(work_s, count, num_tokens=tokens, capacity=max_pack_tokens)
        if len(groups) <= count:
            return [group for group in groups if group]
        count = -(-len(groups) // pp) * pp


BALANCED = Strategy(
    name="balanced",
    description="whole documents, packs of equal predicted seconds",
    plan=plan_balanced,
    ignores_memory=True,
    deals_packs=True,
)
