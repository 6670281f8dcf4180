"""`judged_window`: the windows in which `best_fit` is fastest, so that others are compared with the best of it.

`best_fit` fills windows of `max_pack_tokens`, because that is what its users set; somebody who tunes it finds out that
smaller windows, which are more micro-batches, often shorten a pipeline's ends or save recomputing. So a comparison
tries half of the window, a quarter and so on, the one that the user set (`best_fit.window_tokens`), and what lies
between the best one and its neighbours, on all steps, and takes the one with the least mean step time within memory, as
one constant for the run. Halving ends behind two windows that are both slower than the best, where most documents are
windows of their own, and after `MOST_HALVINGS`.
O(windows) plans of every step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.explore.planned_steps import planned_steps
from evenload.explore.sampled_batches import SampledBatch
from evenload.plan.planner import StepPlanner
from evenload.plan.strategies.best_fit import BEST_FIT, BestFitOptions

MOST_HALVINGS = 8
_IN_VAIN = 2
"""Halvings in a row that are slower than the best, behind which nothing is tried."""


class JudgedWindow(NamedTuple):
    """A window, and the mean step time with it, infinite where it does not fit memory."""

    window_tokens: int
    mean_step_time_s: float


def with_window(planner: StepPlanner, window_tokens: int) -> StepPlanner:
    """A planner whose `best_fit` fills windows of so many tokens."""
    options = planner.options.with_own(BestFitOptions(window_tokens=window_tokens))
    costs = planner.costs
    return StepPlanner(
        costs.model, costs.coefficients, planner.layout, planner.memory_cap_bytes, options, host=planner.host
    )


def judged_window(planner: StepPlanner, batches: Sequence[SampledBatch]) -> JudgedWindow | None:
    """The windows in which `best_fit` is fastest; None where it fits memory with none, or has no window."""
    limit = planner.options.max_pack_tokens
    if limit is None:
        return None
    lengths = [document.num_tokens for batch in batches for document in batch.documents]
    median = int(np.median(lengths)) if lengths else 1

    def judge(window_tokens: int) -> JudgedWindow:
        return JudgedWindow(window_tokens, _mean_seconds(with_window(planner, window_tokens), batches))

    tried = _halvings(limit, max(1, median), judge)
    own = planner.options.own(BestFitOptions).window_tokens
    if own is not None and own not in {one.window_tokens for one in tried}:
        tried.append(judge(own))
    best = min(tried, key=_by_time)
    between = {best.window_tokens * 3 // 4, best.window_tokens * 3 // 2}
    known = {one.window_tokens for one in tried}
    tried += [judge(tokens) for tokens in sorted(between - known) if median <= tokens <= limit and tokens >= 1]
    best = min(tried, key=_by_time)
    return None if np.isinf(best.mean_step_time_s) else best


def _halvings(limit: int, least: int, judge: Callable[[int], JudgedWindow]) -> list[JudgedWindow]:
    tried = [judge(limit)]
    for halving in range(1, MOST_HALVINGS + 1):
        if limit >> halving < least:
            break
        tried.append(judge(limit >> halving))
        best = min(tried, key=_by_time)
        if best.mean_step_time_s < float("inf") and all(one is not best for one in tried[-_IN_VAIN:]):
            break
    return tried


def _by_time(one: JudgedWindow) -> tuple[float, int]:
    """Of equals the largest window, which is the one that was asked for."""
    return one.mean_step_time_s, -one.window_tokens


def _mean_seconds(planner: StepPlanner, batches: Sequence[SampledBatch]) -> float:
    try:
        proposals, _, _ = planned_steps(planner, batches, BEST_FIT.name)
    except (ConfigError, DataError, InfeasiblePlanError):
        return float("inf")
    if not all(proposal.feasible for proposal in proposals):
        return float("inf")
    return float(np.mean([proposal.plan.predicted.step_time_s for proposal in proposals]))
