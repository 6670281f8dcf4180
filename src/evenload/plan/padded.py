"""`padded`: consecutive documents in a batch padded to their longest; the naive baseline (Async packing).

Documents stay in arrival order, no sorting by length: what a plain data loader with a padding collator does. A
batch takes the next document while `(count + 1) · longest <= max_pack_tokens`. Batches are dealt round robin to
replicas and run in 1F1B. O(n). Cost: every document pays for the longest beside it.
"""

from itertools import pairwise

import numpy as np

from evenload.plan.candidate import one_f_one_b_candidate
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.types.columns import whole_document_columns


def plan_padded(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """One choice per replica.

    Raises:
        ConfigError: no `max_pack_tokens`.
        DataError: a document longer than that.
    """
    batches = padded_batches(problem.num_tokens.tolist(), problem.window_tokens("padded"))
    return deal_packs(problem, batches, padded=True)


def padded_batches(num_tokens: list[int], max_pack_tokens: int) -> list[list[int]]:
    """Consecutive document indices of every batch."""
    batches: list[list[int]] = []
    longest = 0
    for index, tokens in enumerate(num_tokens):
        longest = max(longest, tokens)
        if batches and (len(batches[-1]) + 1) * longest <= max_pack_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = tokens
    return batches


def deal_packs(problem: StepProblem, packs: list[list[int]], *, padded: bool) -> tuple[ReplicaChoice, ...]:
    """Pack i goes to replica `i mod dp`; 1F1B in that order."""
    choices = []
    for dp_rank in range(problem.layout.dp):
        mine = packs[dp_rank :: problem.layout.dp]
        documents = np.array([index for pack in mine for index in pack], dtype=np.int64)
        edges = np.cumsum([0, *(len(pack) for pack in mine)]).tolist()
        groups = [list(range(lo, hi)) for lo, hi in pairwise(edges)]
        num_tokens = problem.num_tokens[documents]
        columns = whole_document_columns(groups, num_tokens, padded=padded)
        label = f"{len(mine)} packs, 1F1B"
        choices.append(
            ReplicaChoice(
                documents,
                one_f_one_b_candidate(
                    label,
                    columns,
                    num_tokens,
                    problem.costs,
                    problem.cap_bytes,
                    problem.options,
                    problem.policy_of(documents),
                ),
            )
        )
    return tuple(choices)
