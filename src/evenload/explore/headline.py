"""`headline`: what a comparison comes to, as data: the fastest strategy, by how much, and what the baseline loses more.

The reasons are the causes of `types.time_split` in which the baseline spends most seconds more than the best strategy,
at most two, and none below `LEAST_SHARE` of the baseline's step.
"""

from evenload.explore.evaluate import Evaluation, StrategyResult
from evenload.types.base import Frozen

MOST_REASONS = 2
LEAST_SHARE = 0.01


class Reason(Frozen):
    """A cause of `TimeSplit`, by its label, as shares of the baseline's and of the best strategy's step."""

    cause: str
    baseline_share: float
    best_share: float


class Headline(Frozen):
    """One comparison in short.

    Args:
        best: the fastest strategy within memory.
        step_time_s: mean, predicted; interval_s: where nine of ten measured step times lie.
        factor: the baseline's mean step time over it; None without a baseline.
        baseline_window_tokens: of `best_fit`'s windows that suit it best; None where it was not compared, or fits
            memory in none.
        factor_over_best_fit: over `best_fit` as it was asked for; None where that does not fit memory.
        reasons: dearest first.
        layout, baseline_layout: sizes of the dimensions, which differ where each strategy is in its own.
        fraction_of_bound, fraction_of_layout_bound, bubble_fraction: of the best strategy.
        baseline_bubble_fraction: of the baseline.
    """

    best: str
    step_time_s: float
    interval_s: tuple[float, float] | None
    factor: float | None = None
    baseline_window_tokens: int | None = None
    factor_over_best_fit: float | None = None
    reasons: tuple[Reason, ...] = ()
    layout: dict[str, int]
    baseline_layout: dict[str, int] | None = None
    fraction_of_bound: float | None = None
    fraction_of_layout_bound: float | None = None
    bubble_fraction: float | None = None
    baseline_bubble_fraction: float | None = None


def headline(evaluation: Evaluation) -> Headline | None:
    """None where no strategy fits memory."""
    if evaluation.best is None:
        return None
    best = next(result for result in evaluation.results if result.name == evaluation.best)
    assert best.mean_step_time_s is not None, "the best one was planned"
    found = evaluation.baseline
    return Headline(
        best=best.name,
        step_time_s=best.mean_step_time_s,
        interval_s=best.step_time_interval_s,
        factor=best.speedup_over_baseline,
        baseline_window_tokens=None if found is None else found.window_tokens,
        factor_over_best_fit=best.speedup_over_best_fit,
        layout=best.layout,
        baseline_layout=None if found is None else found.layout,
        reasons=_reasons(best, found) if found is not None else (),
        fraction_of_bound=best.fraction_of_bound,
        fraction_of_layout_bound=best.fraction_of_layout_bound,
        bubble_fraction=best.bubble_fraction,
        baseline_bubble_fraction=None if found is None else found.bubble_fraction,
    )


def _reasons(best: StrategyResult, baseline: StrategyResult) -> tuple[Reason, ...]:
    if best.time_split is None or baseline.time_split is None:
        return ()
    best_s, baseline_s = best.time_split.total_s(), baseline.time_split.total_s()
    pairs = zip(baseline.time_split.parts()[1:], best.time_split.parts()[1:], strict=True)
    more = sorted(((slow_s - fast_s, cause, slow_s, fast_s) for (cause, slow_s), (_, fast_s) in pairs), reverse=True)
    return tuple(
        Reason(cause=cause, baseline_share=slow_s / baseline_s, best_share=fast_s / best_s)
        for more_s, cause, slow_s, fast_s in more[:MOST_REASONS]
        if more_s > LEAST_SHARE * baseline_s
    )
