"""One row a strategy: what `evenload plan --engine` predicts of an engine, beside Evenload's runtime on the same plan.

Figures are means over the steps unless they say otherwise. Where a run's steps all have as many micro-batches as any
other, that number is the one of the step that needs most; where shapes are fixed, every micro-batch has
`max_pack_tokens` tokens: as `PackedLoader` makes them.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from evenload.engines.engine_planner import EnginePlanner
from evenload.engines.price import EnginePrice
from evenload.engines.profile import Limitation
from evenload.engines.projection import StepShape
from evenload.engines.refusals import BEST, require_strategy, runnable
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress, planned_steps
from evenload.plan.planner import Proposal
from evenload.plan.strategies.strategy import LeftOutStrategy
from evenload.types.base import Frozen


class EngineResult(Frozen):
    """Figures of one strategy on an engine; None where it could not be planned.

    Args:
        name: the strategy.
        why: it could not be planned; "" = it could.
        planned_by: under `auto` the strategy that was fastest in most steps, "" elsewhere.
        step_time_s: of every step; mean_step_time_s of these.
        own_step_time_s: what Evenload's runtime takes for the same plans, mean.
        end_s: of the step what comes after its last micro-batch.
        idle_fraction, padding_fraction: as `EnginePrice`.
        micro_batches: of all data-parallel ranks; empty_micro_batches: of these, without documents.
        max_padded_tokens: of the longest micro-batch of all steps.
        micro_batches_per_rank: where every step needs equally many: that number; else None.
    """

    name: str
    why: str = ""
    planned_by: str = ""
    step_time_s: tuple[float, ...] = ()
    mean_step_time_s: float | None = None
    own_step_time_s: float | None = None
    end_s: float | None = None
    idle_fraction: float | None = None
    padding_fraction: float | None = None
    micro_batches: float | None = None
    empty_micro_batches: float | None = None
    max_padded_tokens: int | None = None
    micro_batches_per_rank: int | None = None


@dataclass(frozen=True, eq=False)
class EngineEvaluation:
    """All strategies on the same batches on one engine.

    Args:
        engine, title: of the profile.
        results: in the order asked for; best: the fastest, "" where none could be planned.
        left_out: what the engine cannot run, where all strategies were asked for.
        not_adapted: of the plans in this layout what Evenload's adapter to the engine refuses to run.
    """

    engine: str
    title: str
    results: tuple[EngineResult, ...]
    best: str
    left_out: tuple[LeftOutStrategy, ...] = ()
    not_adapted: tuple[Limitation, ...] = ()


def evaluate_engine(
    planner: EnginePlanner,
    batches: Sequence[SampledBatch],
    strategies: Sequence[str] | None,
    on_progress: OnProgress = no_progress,
) -> EngineEvaluation:
    """Plan every batch with every strategy, and price the plans on the engine.

    Args:
        strategies: None = all that the engine can run, and `auto`.
        on_progress: called before each strategy.

    Raises:
        ConfigError: a strategy was named that the engine cannot run.
    """
    planner = planner.remembering()
    profile, left_out = planner.profile, ()
    if strategies is None:
        names, left_out = runnable(profile, planner.options, planner.layout)
        strategies = (*names, BEST)
    for name in strategies:
        require_strategy(profile, name, planner.options, planner.layout)
    results = []
    for index, name in enumerate(strategies):
        on_progress(index, len(strategies), f"{name} on {profile.name}")
        results.append(_evaluate(planner, batches, name))
    planned = [result for result in results if result.mean_step_time_s is not None]
    best = min(planned, key=lambda one: one.mean_step_time_s or 0.0).name if planned else ""
    return EngineEvaluation(
        profile.name, profile.title, tuple(results), best, left_out, profile.not_adapted_in(planner.layout)
    )


def _evaluate(planner: EnginePlanner, batches: Sequence[SampledBatch], name: str) -> EngineResult:
    try:
        if name == BEST and _wants_one_count(planner):
            proposals, prices, count = _fastest_count(planner, batches)
        else:
            proposals, _, _ = planned_steps(planner, batches, name)
            prices, count = _priced(planner, proposals)
    except (ConfigError, DataError, InfeasiblePlanError) as error:
        # One strategy that does not apply must not hide the others; its row says why.
        return EngineResult(name=name, why=str(error))
    step_time_s = tuple(price.step_time_s for price in prices)
    winners = Counter(proposal.plan.strategy for proposal in proposals)
    return EngineResult(
        name=name,
        planned_by=winners.most_common(1)[0][0] if name == BEST else "",
        step_time_s=step_time_s,
        mean_step_time_s=float(np.mean(step_time_s)),
        own_step_time_s=float(np.mean([proposal.plan.predicted.step_time_s for proposal in proposals])),
        end_s=_mean(prices, "end_s"),
        idle_fraction=_mean(prices, "idle_fraction"),
        padding_fraction=_mean(prices, "padding_fraction"),
        micro_batches=_mean(prices, "micro_batches"),
        empty_micro_batches=_mean(prices, "empty_micro_batches"),
        max_padded_tokens=max(price.max_padded_tokens for price in prices),
        micro_batches_per_rank=count,
    )


def _wants_one_count(planner: EnginePlanner) -> bool:
    """All steps have equally many micro-batches, and nobody said how many."""
    is_given = planner.shape is not None and planner.shape.micro_batches is not None
    return planner.profile.is_constant_in(planner.layout) and not is_given


def _fastest_count(
    planner: EnginePlanner, batches: Sequence[SampledBatch]
) -> tuple[list[Proposal], list[EnginePrice], int | None]:
    """The run of `auto` at the one number of micro-batches with which it is fastest.

    What a step would choose alone may need so many micro-batches that all other steps pay for padding. So every number
    that a strategy's run needs is tried, and in each of these runs every step chooses at that number: never slower than
    a strategy that puts nothing off to later steps.
    """
    failures = (ConfigError, DataError, InfeasiblePlanError)
    counts: set[int | None] = set()
    for name in runnable(planner.profile, planner.options, planner.layout)[0]:
        try:
            counts.add(_priced(planner, planned_steps(planner, batches, name)[0])[1])
        except failures:
            continue  # of one strategy: its own row says why
    found: list[tuple[list[Proposal], list[EnginePrice], int | None]] = []
    failed: list[Exception] = []
    for count in sorted(one for one in counts if one is not None):
        at_count = copy.copy(planner)
        at_count.shape = msgspec.structs.replace(planner.shape or StepShape(), micro_batches=count)
        try:
            proposals, _, _ = planned_steps(at_count, batches, BEST)
            found.append((proposals, *_priced(at_count, proposals)))
        except failures as error:
            failed.append(error)  # a step needs more of them under every strategy
    if not found:
        raise failed[0] if failed else ConfigError(f"engine {planner.profile.name}: no strategy has a plan for the run")
    return min(found, key=lambda one: sum(price.step_time_s for price in one[1]))


def _priced(planner: EnginePlanner, proposals: Sequence[Proposal]) -> tuple[list[EnginePrice], int | None]:
    """Of every step, and the number of micro-batches where it is one for all of them."""
    profile, layout = planner.profile, planner.layout
    if not profile.is_constant_in(layout):
        return [planner.price(proposal) for proposal in proposals], None
    shape, multiple = planner.shape or StepShape(), profile.count_multiple_in(layout)
    count = shape.micro_batches
    if count is None:
        most = max(len(packs.forward) for proposal in proposals for packs in proposal.plan.pack_plans)
        count = max(1, -(-most // multiple)) * multiple
    shape = msgspec.structs.replace(shape, micro_batches=count)
    return [planner.price(proposal, shape) for proposal in proposals], count


def _mean(prices: Sequence[EnginePrice], field: str) -> float:
    return float(np.mean([getattr(price, field) for price in prices]))
