"""`fixed_greedy` and `fixed_exact`: fixed-length windows of equal attention work (WLB §3.2, eq. 1).

Every micro-batch is a window of at most `max_pack_tokens`; as few windows as the tokens need, a multiple of dp;
documents are spread so that the largest window has the least attention work.

    fixed_greedy   longest attention work first into the window with the least that has room; O(n log n)
    fixed_exact    the MILP of eq. 1 (`plan.packing.exact`) from the greedy answer, within `solver_time_limit_s`;
                   where it stops there, the result's note says so, with the gap

`window` = W > 1 packs over W global batches (WLB Fig. 6). A loader hands out one batch a step, so the strategy keeps
a pool: each step packs all documents that wait together with the new ones and trains the W-th part of the windows,
those that waited longest by tokens, with neighbours in work beside them; the rest is packed anew. The pool settles
at W batches, the first steps and the last are smaller and larger. Mean delay is about W - 1 steps, never more than
`max_delay_steps`. Attention pairs are those of the model's own windows, not d² of full attention.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import slice_pairs
from evenload.errors import ConfigError
from evenload.plan.deferral.delay import Arrivals, DelayedChoice
from evenload.plan.packing.bin_packing import longest_first
from evenload.plan.packing.exact import exact_groups
from evenload.plan.packing.whole_packs import assign_evenly
from evenload.plan.problem.options import PlanOptions, StrategyOptions
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.strategies.strategy import Strategy


class FixedExactOptions(StrategyOptions, tag="fixed_exact"):
    """The solver of `fixed_exact`.

    Args:
        solver_time_limit_s: for one step.

    Raises:
        ConfigError: no time.
    """

    solver_time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.solver_time_limit_s > 0:
            raise ConfigError(
                f"plan options: fixed_exact.solver_time_limit_s is {self.solver_time_limit_s}, must be above 0"
            )


Packer = Callable[[StepProblem, NDArray[np.float64], int], tuple[list[list[int]], str]]
"""(problem, attention work, windows wanted) to (documents of every window, note)."""


def _packs_over_batches(options: PlanOptions) -> bool:
    return options.window > 1


def attention_work(problem: StepProblem) -> NDArray[np.float64]:
    """(query, key) pairs of every document over all layers; float64[n]."""
    model, tokens = problem.costs.model, problem.num_tokens
    zero, total = np.zeros_like(tokens), np.zeros(len(tokens))
    for window in problem.costs.windows:
        total += model.windows.count(window) * slice_pairs(zero, tokens, window, causal=model.causal)
    return total


def _plan_all(problem: StepProblem, name: str, pack: Packer) -> tuple[ReplicaChoice, ...]:
    """Of this batch alone."""
    windows, note = pack(problem, attention_work(problem), _num_windows(problem, name))
    return assign_evenly(problem, windows, note)


def _plan_pool(problem: StepProblem, arrivals: Arrivals, name: str, pack: Packer) -> DelayedChoice:
    """Over `window` global batches."""
    if arrivals.is_last or problem.options.window == 1:
        return DelayedChoice(_plan_all(problem, name, pack))
    work = attention_work(problem)
    windows, note = pack(problem, work, _num_windows(problem, name))
    windows = [window for window in windows if window]
    chosen = _due_windows(problem, arrivals, work, windows)
    return DelayedChoice(assign_evenly(problem, [windows[index] for index in chosen], note))


def _num_windows(problem: StepProblem, name: str) -> int:
    """Fewest windows that hold the tokens, a multiple of dp."""
    dp, capacity = problem.layout.dp, problem.window_tokens(name)
    return max(1, -(-int(problem.num_tokens.sum()) // (capacity * dp))) * dp


def _greedy(problem: StepProblem, work: NDArray[np.float64], num_windows: int) -> tuple[list[list[int]], str]:
    capacity, dp = problem.options.max_pack_tokens, problem.layout.dp
    while True:
        windows = longest_first(work, num_windows, num_tokens=problem.num_tokens, capacity=capacity)
        if len(windows) <= num_windows:
            return windows, ""
        num_windows = -(-len(windows) // dp) * dp


def _exact(problem: StepProblem, work: NDArray[np.float64], num_windows: int) -> tuple[list[list[int]], str]:
    windows, _ = _greedy(problem, work, num_windows)
    limit_s = problem.options.own(FixedExactOptions).solver_time_limit_s
    capacity = problem.window_tokens("fixed_exact")
    found = exact_groups(work, problem.num_tokens, capacity, start=windows, time_limit_s=limit_s)
    note = "" if found.is_optimal else f"solver stopped at {limit_s:g} s, at most {found.gap:.1%} above the optimum"
    return [list(group) for group in found.groups], note


def _due_windows(
    problem: StepProblem, arrivals: Arrivals, work: NDArray[np.float64], windows: list[list[int]]
) -> list[int]:
    """Windows to train now: the run of neighbours in work whose tokens waited longest, and all that are overdue."""
    options, dp = problem.options, problem.layout.dp
    if not windows:
        return []
    age, tokens = arrivals.age_steps(), problem.num_tokens
    by_work = sorted(range(len(windows)), key=lambda index: (-float(work[windows[index]].sum()), index))
    count = min(len(windows), -(-len(windows) // (options.window * dp)) * dp)
    waited = np.array([float((age[windows[index]] * tokens[windows[index]]).sum()) for index in by_work])
    runs = np.convolve(waited, np.ones(count), mode="valid")
    first = int(runs.argmax())
    run = by_work[first : first + count]
    overdue = [index for index in by_work if (age[windows[index]] >= options.max_delay_steps).any()]
    return sorted({*run, *overdue})


FIXED_GREEDY = Strategy(
    name="fixed_greedy",
    description="packs of fixed length with the least attention work, greedily",
    plan=partial(_plan_all, name="fixed_greedy", pack=_greedy),
    delay=partial(_plan_pool, name="fixed_greedy", pack=_greedy),
    moves_documents=_packs_over_batches,
    ignores_memory=True,
)
FIXED_EXACT = Strategy(
    name="fixed_exact",
    description="packs of fixed length with the least attention work, by an exact solver",
    plan=partial(_plan_all, name="fixed_exact", pack=_exact),
    delay=partial(_plan_pool, name="fixed_exact", pack=_exact),
    options=FixedExactOptions,
    moves_documents=_packs_over_batches,
    solver_limit_s=lambda options: options.own(FixedExactOptions).solver_time_limit_s,
)
