"""Say what computing shared prefixes once saves, and what it costs in memory (`tree_savings`)."""

from collections.abc import Sequence
from dataclasses import replace

from evenload.explore.batches import SampledBatch
from evenload.explore.evaluate import Evaluation, StrategyPlanners, StrategyResult, evaluate_strategies
from evenload.types.base import Frozen


class TreeSavings(Frozen):
    """Hold the steps of a strategy beside the same steps with every sequence as a document of its own; predicted.

    A tree holds the activations of all its unique tokens until its backward, a sequence only its own, so sharing may
    need more memory.

    Args:
        unique_tokens, path_tokens: of the batches, computed and of all their sequences.
        recomputed_tokens: of the unique ones, those that trees have twice because they were cut.
        shared, alone: the strategy's row with trees, and with the sequences.
        speedup: how many times as fast a step with sharing is; None where the sequences do not fit memory.
    """

    unique_tokens: int
    path_tokens: int
    recomputed_tokens: int
    shared: StrategyResult
    alone: StrategyResult
    speedup: float | None


def tree_savings(
    planners: StrategyPlanners, batches: Sequence[SampledBatch], evaluation: Evaluation, shared: StrategyResult
) -> TreeSavings | None:
    """Plan the sequences of the batches one by one, with the strategy of a row of the evaluation of their trees. None
    where nothing is shared, or a part of a large cluster was planned."""
    if planners.of(shared.name).batches is not None or not any(batch.alone for batch in batches):
        return None
    apart = [replace(batch, documents=batch.alone, alone=()) for batch in batches]
    (alone,) = evaluate_strategies(planners, apart, [shared.name]).results
    documents = [document for proposal in evaluation.proposals[shared.name] for document in proposal.plan.documents]
    slow_s, fast_s = alone.mean_step_time_s, shared.mean_step_time_s
    return TreeSavings(
        unique_tokens=sum(document.num_tokens for document in documents),
        path_tokens=sum(document.num_tokens for batch in apart for document in batch.documents),
        recomputed_tokens=sum(document.num_recomputed_tokens for document in documents),
        shared=shared,
        alone=alone,
        speedup=slow_s / fast_s if alone.feasible and slow_s and fast_s else None,
    )
