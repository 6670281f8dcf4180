"""Search the global batches of a table of lengths for the one that needs most memory (`evenload plan --worst`).

Batches are planned and compared: the extremes first (the longest together; the longest few with the shortest), then
neighbours of the worst one, with a few documents exchanged. Worse is one that does not fit, of which more tokens must
be recomputed or offloaded, or that takes more memory. That no other is worse is not proven. O(batches) plans.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.data.lengths import TreeLengths
from evenload.explore.batches import NO_TREES, BatchRule, OnProgress, SampledBatch, no_progress
from evenload.planning.planner import Proposal, StepPlanner
from evenload.planning.strategies.registry import strategy_named
from evenload.planning.tree_runs import in_parts
from evenload.types.base import Frozen

_EXCHANGED = 8  # most documents by which a neighbour differs
Order = NDArray[np.int64]
"""Entries of the table; a batch is drawn from its beginning, again and again where the table is smaller."""


class WorstBatch(Frozen):
    """The batch of a search that needs most memory under one strategy.

    Args:
        searched: batches planned; drawn: how this one was drawn.
        longest: tokens of its longest documents, at most eight.
        policies: number of documents by activation policy.
        fits: within the limit; why: it does not.
        leaves_out_deferred: the strategy defers documents, and those of earlier batches are not counted.
    """

    strategy: str
    searched: int
    drawn: str
    longest: tuple[int, ...]
    documents: int
    tokens: int
    peak_memory_bytes: int
    policies: dict[str, int]
    fits: bool
    why: str
    leaves_out_deferred: bool


@dataclass(frozen=True, eq=False)
class _Planned:
    order: Order
    drawn: str
    batch: SampledBatch
    proposal: Proposal

    @property
    def need(self) -> tuple[bool, int, int]:
        """Sorts batches; where planners choose policies, memory is often full, and what it does not hold decides."""
        not_stored = {doc_id for packs in self.proposal.plan.pack_plans for doc_id in packs.policies}
        tokens = sum(document.num_tokens for document in self.batch.documents if document.doc_id in not_stored)
        return not self.proposal.feasible, tokens, self.proposal.plan.predicted.peak_memory_bytes


def find_worst(
    planner: StepPlanner,
    lengths: NDArray[np.int64],
    rule: BatchRule,
    strategy: str,
    count: int,
    *,
    seed: int,
    trees: Mapping[int, TreeLengths] = NO_TREES,
    on_progress: OnProgress = no_progress,
) -> WorstBatch:
    """Search `count` global batches, at least one, drawn by a rule from a table of lengths, int64[n], and the trees
    among them, for the one that needs most memory; `seed` is of the neighbours, and documents are not deferred.

    Raises:
        ConfigError, DataError, InfeasiblePlanError: the strategy has no plan for a batch, within memory or not.
    """
    generator = np.random.default_rng(seed)

    def draw(order: Order) -> SampledBatch:
        return rule.draw(lengths, itertools.cycle(order.tolist()), trees=trees)

    worst: _Planned | None = None
    extremes = _extremes(lengths, draw)
    for searched in range(count):
        on_progress(searched, count, f"worst batch of {strategy}")
        order, drawn = next(extremes, (None, ""))
        if order is None:
            assert worst is not None
            order, drawn = _neighbour(worst, generator), worst.drawn.removesuffix(_NEAR) + _NEAR
        batch = draw(order)
        batch = replace(batch, documents=in_parts(batch.documents, planner.costs))
        planned = _Planned(order, drawn, batch, planner.propose(0, batch.documents, strategy))
        if worst is None or planned.need > worst.need:
            worst = planned
    assert worst is not None
    return _described(planner, worst, strategy, count)


_NEAR = ", some exchanged"


def _extremes(lengths: NDArray[np.int64], draw: Callable[[Order], SampledBatch]) -> Iterator[tuple[Order, str]]:
    longest_first = np.argsort(-lengths, kind="stable")
    yield longest_first, "the longest together"
    num_longest = 1
    # With as many as a batch holds it would be the first again.
    while num_longest < min(len(draw(longest_first).documents), len(lengths)):
        rest = longest_first[num_longest:][::-1]
        yield np.concatenate([longest_first[:num_longest], rest]), f"the longest {num_longest} with the shortest"
        num_longest *= 4


def _neighbour(planned: _Planned, generator: np.random.Generator) -> Order:
    order = planned.order.copy()
    size = min(len(planned.batch.documents), len(order))
    for _ in range(int(generator.integers(1, _EXCHANGED + 1))):
        one, other = generator.integers(size), generator.integers(len(order))
        order[[one, other]] = order[[other, one]]
    return order


def _described(planner: StepPlanner, worst: _Planned, strategy: str, searched: int) -> WorstBatch:
    documents, plan = worst.batch.documents, worst.proposal.plan
    policies = {document.doc_id: "replay" for document in documents}
    for packs in plan.pack_plans:
        policies |= packs.policies
    names = Counter(policies.values())
    lengths = sorted((document.num_tokens for document in documents), reverse=True)
    return WorstBatch(
        strategy=strategy,
        searched=searched,
        drawn=worst.drawn,
        longest=tuple(lengths[:8]),
        documents=len(documents),
        tokens=sum(lengths),
        peak_memory_bytes=plan.predicted.peak_memory_bytes,
        policies=dict(sorted(names.items())),
        fits=worst.proposal.feasible,
        why=worst.proposal.why,
        leaves_out_deferred=strategy_named(strategy).delays(planner.options),
    )
