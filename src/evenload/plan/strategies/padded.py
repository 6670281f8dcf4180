"""`padded`: consecutive documents in a batch padded to their longest; the naive baseline (Async packing).

Documents stay in arrival order, no sorting by length: what a plain data loader with a padding collator does. A
batch takes the next document while `(count + 1) · longest <= max_pack_tokens`. Batches are assigned round robin to
replicas and run in 1F1B. O(n). Cost: every document pays for the longest beside it.
"""

from evenload.plan.packing.whole_packs import assign_in_turn
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.strategies.strategy import Strategy


def plan_padded(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    batches = padded_batches(problem.num_tokens.tolist(), problem.window_tokens("padded"))
    return assign_in_turn(problem, batches, padded=True)


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


PADDED = Strategy(
    name="padded",
    description="pads documents to the longest of their pack: a baseline, wastes compute",
    plan=plan_padded,
    ignores_memory=True,
)
