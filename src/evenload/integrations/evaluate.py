"""`evaluate_engine`: what `evenload plan --engine` predicts of every strategy, on the engine and on Evenload's runtime.

Where all steps of a run need equally many micro-batches, they have those of the step that needs most.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from evenload.errors import ConfigError
from evenload.explore.batches import OnProgress, SampledBatch, no_progress, plan_steps
from evenload.integrations.catalog import BEST, Limitation, require_strategy, runnable
from evenload.integrations.planner import PLANNING_ERRORS, EnginePlanner
from evenload.integrations.price import EnginePrice
from evenload.planning.planner import Proposal
from evenload.planning.strategies.strategy import LeftOutStrategy
from evenload.types.base import Frozen

_MEANS = ("end_s", "idle_fraction", "padding_fraction", "micro_batches", "empty_micro_batches")


class EngineResult(Frozen):
    """Holds the figures of one strategy on an engine, means over the steps; None where it could not be planned.

    Args:
        why: why it could not be planned; "" = it could.
        planned_by: under `auto` the strategy that was fastest in most steps, "" elsewhere.
        own_step_time_s: of the same plans on Evenload's runtime. All below it: as `EnginePrice`.
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
    """Holds the results of all strategies on the same batches.

    Args:
        results: in the order of the request; best: the fastest, "" where none could be planned.
        left_out: strategies that the engine cannot run, where all were requested.
        not_adapted: what Evenload's adapter to the engine refuses to run of these plans.
    """

    engine: str
    title: str
    results: tuple[EngineResult, ...]
    best: str
    left_out: tuple[LeftOutStrategy, ...] = ()
    not_adapted: tuple[Limitation, ...] = ()


class _Run(NamedTuple):
    """Holds the plans of all steps with their prices; `count` is None where steps may differ in micro-batches."""

    proposals: Sequence[Proposal]
    prices: Sequence[EnginePrice]
    count: int | None

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(price.step_time_s for price in self.prices)


def evaluate_engine(
    planner: EnginePlanner,
    batches: Sequence[SampledBatch],
    strategies: Sequence[str] | None,
    on_progress: OnProgress = no_progress,
) -> EngineEvaluation:
    """Plan every batch with every strategy (None = all that the engine can run, and `auto`; a named one that it cannot
    run is a `ConfigError`), and price the plans on the engine."""
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
    not_adapted = profile.not_adapted_in(planner.layout)
    return EngineEvaluation(profile.name, profile.title, tuple(results), best, left_out, not_adapted)


def _evaluate(planner: EnginePlanner, batches: Sequence[SampledBatch], name: str) -> EngineResult:
    try:
        wants_count = planner.profile.is_constant_in(planner.layout) and planner.shape.micro_batches is None
        run = _fastest_count(planner, batches) if name == BEST and wants_count else _priced(planner, batches, name)
    except PLANNING_ERRORS as error:
        return EngineResult(name=name, why=str(error))  # one strategy that does not apply must not hide the others
    winners = Counter(proposal.plan.strategy for proposal in run.proposals)
    means: dict[str, Any] = {field: float(np.mean([getattr(price, field) for price in run.prices])) for field in _MEANS}
    return EngineResult(
        name=name,
        planned_by=winners.most_common(1)[0][0] if name == BEST else "",
        step_time_s=run.seconds,
        mean_step_time_s=float(np.mean(run.seconds)),
        own_step_time_s=float(np.mean([proposal.plan.predicted.step_time_s for proposal in run.proposals])),
        max_padded_tokens=max(price.max_padded_tokens for price in run.prices),
        micro_batches_per_rank=run.count,
        **means,
    )


def _fastest_count(planner: EnginePlanner, batches: Sequence[SampledBatch]) -> _Run:
    """Return the run of `auto` at the one number of micro-batches, of those that strategies need, that is fastest.

    So it is never slower than a strategy that defers nothing, though one step may choose so many micro-batches that all
    others pay for padding.
    """
    counts: set[int] = set()
    for name in runnable(planner.profile, planner.options, planner.layout)[0]:
        with suppress(*PLANNING_ERRORS):  # the strategy's own result has the reason
            counts.add(_priced(planner, batches, name).count or 1)
    runs: list[_Run] = []
    failed: list[Exception] = []
    for count in sorted(counts):
        try:
            runs.append(_priced(planner.at_count(count), batches, BEST))
        except PLANNING_ERRORS as error:
            failed.append(error)  # some step needs more under every strategy
    if not runs:
        raise failed[0] if failed else ConfigError(f"engine {planner.profile.name}: no strategy has a plan for the run")
    return min(runs, key=lambda run: sum(run.seconds))


def _priced(planner: EnginePlanner, batches: Sequence[SampledBatch], name: str) -> _Run:
    proposals, _, _ = plan_steps(planner, batches, name)
    is_constant = planner.profile.is_constant_in(planner.layout)
    if is_constant and planner.shape.micro_batches is None:
        most = max(len(packs.forward) for proposal in proposals for packs in proposal.plan.pack_plans)
        multiple = planner.profile.count_multiple_in(planner.layout)
        planner = planner.at_count(max(1, -(-most // multiple)) * multiple)
    count = planner.shape.micro_batches if is_constant else None
    return _Run(proposals, [planner.price(proposal) for proposal in proposals], count)
