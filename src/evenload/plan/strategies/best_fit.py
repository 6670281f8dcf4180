"""`best_fit`: best-fit decreasing by tokens into windows of `max_pack_tokens`; SlimPack's Megatron-LM baseline.

The whole global batch is packed at once and windows are assigned round robin to replicas, 1F1B. O(n log n).
It fills windows almost perfectly and ignores work: a window with one long document takes many times as long as
a window of short ones, and every stage and replica waits for it.

Smaller windows (`window_tokens`) are more micro-batches: less time at the ends of a pipeline, less memory, more
constants. A document longer than such a window is a pack of its own, so that any window may be asked for. Which one
suits a run best is what a comparison tries for a fair baseline (`explore.fair_baseline`); the strategy never chooses.
"""

import numpy as np

from evenload.errors import ConfigError
from evenload.plan.packing.bin_packing import best_fit_decreasing
from evenload.plan.packing.whole_packs import assign_in_turn
from evenload.plan.problem.options import PlanOptions, StrategyOptions
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.strategies.strategy import Strategy


class BestFitOptions(StrategyOptions, tag="best_fit"):
    """How large windows are.

    Args:
        window_tokens: of a window, at most `max_pack_tokens`; longer documents are packs of their own. None =
            `max_pack_tokens`.

    Raises:
        ConfigError: no token.
    """

    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.window_tokens is not None and self.window_tokens < 1:
            raise ConfigError(f"plan options: best_fit.window_tokens is {self.window_tokens}, must be at least 1")


def plan_best_fit(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    limit, asked = problem.window_tokens("best_fit"), problem.options.own(BestFitOptions).window_tokens
    return assign_in_turn(problem, _windows(problem, limit if asked is None else asked))


def _require_windows(options: PlanOptions) -> None:
    limit, asked = options.max_pack_tokens, options.own(BestFitOptions).window_tokens
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            f"plan options: best_fit.window_tokens is {asked}, max_pack_tokens is {limit}; lower the former or raise "
            "the latter"
        )


def _windows(problem: StepProblem, window_tokens: int) -> list[list[int]]:
    """Documents of every window, longest first; those that no window holds come first, alone."""
    tokens = problem.num_tokens
    longer = np.flatnonzero(tokens > window_tokens)
    if not len(longer):
        return best_fit_decreasing(tokens, window_tokens)
    alone = longer[np.argsort(-tokens[longer], kind="stable")]
    others = np.flatnonzero(tokens <= window_tokens)
    packed = best_fit_decreasing(tokens[others], window_tokens)
    return [[int(at)] for at in alone] + [others[window].tolist() for window in packed]


BEST_FIT = Strategy(
    name="best_fit",
    description="fills packs by tokens, whole documents: a baseline, packs of unequal work",
    plan=plan_best_fit,
    options=BestFitOptions,
    require_options=_require_windows,
    ignores_memory=True,
)
