"""Micro-batches of the whole step to replicas: equal counts, equal time; 1F1B inside a replica.

Longest first by time with at most ceil(count / dp) micro-batches a replica, so that no pipeline runs one
micro-batch more than another. Inside a replica the longest go first: the pipeline drains on short ones. O(n log n).
"""

from itertools import chain

import numpy as np

from evenload.plan.packing.bin_packing import longest_first
from evenload.plan.packing.whole_packs import Shares, price_packs, run_packs
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem


def assign_evenly(problem: StepProblem, groups: list[list[int]], note: str = "") -> tuple[ReplicaChoice, ...]:
    """Whole documents of every micro-batch to replicas; empty ones are left out."""
    return run_packs(problem, price_packs(problem, even_shares(problem, groups)), note)


def even_shares(problem: StepProblem, groups: list[list[int]]) -> Shares:
    """The micro-batches of every replica; empty ones are left out."""
    groups = [group for group in groups if group]
    dp = problem.layout.dp
    group_of = np.repeat(np.arange(len(groups)), np.array([len(group) for group in groups], np.int64))
    documents = np.array(list(chain.from_iterable(groups)), np.int64)
    group_s = np.bincount(group_of, weights=problem.document_s[documents], minlength=len(groups)).astype(np.float64)
    one_each = np.ones(len(groups), np.int64)
    shares = longest_first(group_s, dp, num_tokens=one_each, capacity=max(1, -(-len(groups) // dp)))
    return [[groups[index] for index in share] for share in shares]


def assign_in_turn(problem: StepProblem, packs: list[list[int]], *, padded: bool = False) -> tuple[ReplicaChoice, ...]:
    """Pack i goes to replica `i mod dp`; 1F1B in that order."""
    shares = [packs[dp_rank :: problem.layout.dp] for dp_rank in range(problem.layout.dp)]
    return run_packs(problem, price_packs(problem, shares, padded=padded))
