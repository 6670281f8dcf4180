"""Micro-batches of the whole step to replicas: equal counts, equal time; 1F1B inside a replica.

Longest first by time with at most ceil(count / dp) micro-batches a replica, so that no pipeline runs one
micro-batch more than another. Inside a replica the longest go first: the pipeline drains on short ones. O(n log n).
"""

from itertools import pairwise

import numpy as np

from evenload.plan.bin_packing import longest_first
from evenload.plan.candidate import one_f_one_b_candidate
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.types.columns import whole_document_columns


def deal_evenly(problem: StepProblem, groups: list[list[int]], note: str = "") -> tuple[ReplicaChoice, ...]:
    """One choice per replica.

    Args:
        groups: whole documents of every micro-batch, as indices of the problem; empty ones are left out.
        note: for the report, see `ReplicaChoice`.
    """
    groups = [group for group in groups if group]
    dp = problem.layout.dp
    group_s = np.array([problem.document_s[group].sum() for group in groups], np.float64)
    shares = longest_first(
        group_s,
        dp,
        num_tokens=np.ones(len(groups), np.int64),
        capacity=max(1, -(-len(groups) // dp)),
        backend=problem.options.backend,
    )
    choices = []
    for share in shares:
        mine = [groups[index] for index in share]
        documents = np.array([index for group in mine for index in group], dtype=np.int64)
        edges = np.cumsum([0, *(len(group) for group in mine)]).tolist()
        num_tokens = problem.num_tokens[documents]
        columns = whole_document_columns([list(range(lo, hi)) for lo, hi in pairwise(edges)], num_tokens)
        label = f"{len(mine)} packs, 1F1B"
        found = one_f_one_b_candidate(
            label,
            columns,
            num_tokens,
            problem.costs,
            problem.cap_bytes,
            problem.options,
            problem.policy_of(documents),
        )
        choices.append(ReplicaChoice(documents, found, note))
    return tuple(choices)
