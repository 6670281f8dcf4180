"""Plan by `fixed_greedy` and `fixed_exact`: fixed-length windows of equal attention work (WLB §3.2, eq. 1).

Every micro-batch is a window of at most `max_pack_tokens`; as few windows as the tokens need, a multiple of dp.

    fixed_greedy   longest attention work first into the window with the least that can hold it; O(n log n)
    fixed_exact    the MILP of eq. 1 from the greedy answer, solved by HiGHS (`pip install evenload[exact]`) within
                   `solver_time_limit_s`; the result's note has the gap where it stops there. NP-hard: tens of documents
                   in seconds, hundreds only as far as the time limit goes

`window` = W > 1 packs over W global batches (WLB Fig. 6): each step packs all documents that wait together with the new
ones and trains the W-th part of the windows, those that waited longest by tokens, with their neighbours in work. Mean
delay is about W - 1 steps, never more than `max_delay_steps`.

    minimise t    x[i, j] binary, sum_j x[i, j] = 1, sum_i work[i] x[i, j] <= t, sum_i tokens[i] x[i, j] <= capacity

Groups are interchangeable, so the document of the k-th most work may lie in the first k groups only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import over_kinds, slice_pairs
from evenload.errors import ConfigError
from evenload.planning.deferral import Arrivals, DelayedChoice
from evenload.planning.packing import assign_evenly, longest_first_within
from evenload.planning.problem import ReplicaChoice, StepProblem, StrategyOptions
from evenload.planning.strategies.strategy import Strategy

OPTIMAL_GAP = 1e-6  # Relative distance to the bound below which a solution counts as optimal


@dataclass(frozen=True)
class ExactGroups:
    """Hold the best groups (item indices, ascending; may be empty), the work of the largest one, and a bound below
    which no grouping's is."""

    groups: tuple[tuple[int, ...], ...]
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """Return how much better an optimum could be at most, as a share of the objective."""
        return 0.0 if self.objective <= 0 else max(0.0, 1.0 - self.bound / self.objective)

    @property
    def is_optimal(self) -> bool:
        return self.gap <= OPTIMAL_GAP


def exact_groups(
    work: NDArray[np.float64],
    num_tokens: NDArray[np.int64],
    capacity: int,
    *,
    start: list[list[int]],
    time_limit_s: float = 60.0,
) -> ExactGroups:
    """Put items into as many groups as `start` has (a known grouping within the capacity, groups may be empty), so that
    the largest group has the least work; never worse than `start`.

    Args:
        work: float64[n], finite, not negative; num_tokens: int64[n], of which a group may hold `capacity`.

    Raises:
        ConfigError: highspy is not installed.
    """
    try:
        import highspy
    except ImportError as error:
        raise ConfigError(
            "exact solutions need the package highspy, which is not installed; pip install 'evenload[exact]'"
        ) from error
    count, num_groups = len(work), len(start)
    if not count:
        return ExactGroups(((),) * num_groups, 0.0, 0.0)
    floor = max(float(work.sum()) / num_groups, float(work.max()))
    known = _largest(work, start)
    if known <= floor * (1 + OPTIMAL_GAP):
        return _result(work, start, floor)
    order, scale = np.argsort(-work, kind="stable"), float(work.sum()) / num_groups
    solver = _solver(highspy, work[order] / scale, num_groups, num_tokens[order], capacity)
    solver.setOptionValue("time_limit", float(time_limit_s))
    solver.setOptionValue("mip_rel_gap", OPTIMAL_GAP / 2)
    solution = highspy.HighsSolution()
    solution.col_value = _start_values(order, start, known / scale)
    solver.setSolution(solution)
    solver.run()
    info = solver.getInfo()
    best = start
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        chosen = np.array(solver.getSolution().col_value)[:-1].reshape(count, num_groups).argmax(axis=1)
        result = [order[chosen == group].tolist() for group in range(num_groups)]
        # Rounding in the solver must not lose what was known before.
        best = min(result, start, key=lambda groups: _largest(work, groups))
    return _result(work, best, max(floor, float(info.mip_dual_bound) * scale))


def _solver(
    highspy: Any, work: NDArray[np.float64], num_groups: int, num_tokens: NDArray[np.int64], capacity: int
) -> Any:
    """State the MILP: columns are x row by row, then t, in units of `work`'s; one thread, so the same answer always."""
    n, last, unlimited = len(work), len(work) * num_groups, highspy.kHighsInf
    groups = np.arange(last, dtype=np.int32).reshape(n, num_groups)
    upper = np.append((np.arange(num_groups)[None, :] <= np.arange(n)[:, None]).ravel(), unlimited)
    lower, cost = np.append(np.zeros(last), max(1.0, float(work.max()))), np.append(np.zeros(last), 1.0)
    rows = [(1.0, 1.0, groups[i], np.ones(num_groups)) for i in range(n)]
    for group in groups.T:
        rows.append((-unlimited, 0.0, np.append(group, np.int32(last)), np.append(work, -1.0)))
        rows.append((-unlimited, float(capacity), np.ascontiguousarray(group), num_tokens.astype(np.float64)))
    solver, none = highspy.Highs(), np.empty(0, np.int32)
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.addCols(last + 1, cost, lower, upper, 0, none, none, np.empty(0))
    solver.changeColsIntegrality(last, groups.ravel(), np.full(last, highspy.HighsVarType.kInteger, np.uint8))
    for low, high, columns, values in rows:
        solver.addRow(low, high, len(columns), columns, values)
    return solver


def _start_values(order: NDArray[np.int64], start: list[list[int]], objective: float) -> list[float]:
    """Encode `start` as column values, its groups numbered by their first item in `order` (the symmetry rule)."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    values = np.zeros((len(order), len(start)))
    used = sorted((group for group in start if group), key=lambda group: int(rank[group].min()))
    for number, group in enumerate(used):
        values[rank[group], number] = 1.0
    return [*values.ravel().tolist(), objective]


def _largest(work: NDArray[np.float64], groups: list[list[int]]) -> float:
    return max(float(work[group].sum()) for group in groups if group)


def _result(work: NDArray[np.float64], groups: list[list[int]], bound: float) -> ExactGroups:
    objective = _largest(work, groups)
    return ExactGroups(tuple(tuple(sorted(group)) for group in groups), objective, min(bound, objective))


class FixedExactOptions(StrategyOptions, tag="fixed_exact"):
    """Set the solver of `fixed_exact`.

    Args:
        solver_time_limit_s: for one step.
    """

    solver_time_limit_s: float = 10.0

    def __post_init__(self) -> None:
        if not (limit_s := self.solver_time_limit_s) > 0:
            raise ConfigError(f"plan options: fixed_exact.solver_time_limit_s is {limit_s}, must be above 0")


# (problem, attention work, windows wanted) to (documents of every window, note).
Packer = Callable[[StepProblem, NDArray[np.float64], int], tuple[list[list[int]], str]]


def attention_work(problem: StepProblem) -> NDArray[np.float64]:
    """Count the (query, key) pairs of every document over all layers, of the mean layer's heads; float64[n]."""
    costs, tokens = problem.costs, problem.num_tokens
    counts = np.array([costs.model.kind_counts])
    zero, total = np.zeros_like(tokens), np.zeros(len(tokens))
    for window in costs.windows:
        layers = float(over_kinds(counts, costs.shares.of_reach(costs.shares.attention, window))[0])
        total += layers * slice_pairs(zero, tokens, window, causal=costs.model.causal)
    return total


def _plan_all(problem: StepProblem, name: str, pack: Packer) -> tuple[ReplicaChoice, ...]:
    windows, note = pack(problem, attention_work(problem), _num_windows(problem, name))
    return assign_evenly(problem, windows, note)


def _plan_pool(problem: StepProblem, arrivals: Arrivals, name: str, pack: Packer) -> DelayedChoice:
    if arrivals.is_last or problem.options.window == 1:
        return DelayedChoice(_plan_all(problem, name, pack))
    work = attention_work(problem)
    windows, note = pack(problem, work, _num_windows(problem, name))
    windows = [window for window in windows if window]
    chosen = _due_windows(problem, arrivals, work, windows)
    return DelayedChoice(assign_evenly(problem, [windows[index] for index in chosen], note))


def _num_windows(problem: StepProblem, name: str) -> int:
    dp, capacity = problem.layout.dp, problem.window_tokens(name)
    return max(1, -(-int(problem.num_tokens.sum()) // (capacity * dp))) * dp


def _greedy(problem: StepProblem, work: NDArray[np.float64], num_windows: int) -> tuple[list[list[int]], str]:
    capacity, dp = problem.options.max_pack_tokens, problem.layout.dp
    return longest_first_within(work, num_windows, dp, problem.num_tokens, capacity), ""


def _exact(problem: StepProblem, work: NDArray[np.float64], num_windows: int) -> tuple[list[list[int]], str]:
    windows, _ = _greedy(problem, work, num_windows)
    limit_s = problem.options.own(FixedExactOptions).solver_time_limit_s
    capacity = problem.window_tokens("fixed_exact")
    result = exact_groups(work, problem.num_tokens, capacity, start=windows, time_limit_s=limit_s)
    note = "" if result.is_optimal else f"solver stopped at {limit_s:g} s, at most {result.gap:.1%} above the optimum"
    return [list(group) for group in result.groups], note


def _due_windows(
    problem: StepProblem, arrivals: Arrivals, work: NDArray[np.float64], windows: list[list[int]]
) -> list[int]:
    """Choose the windows to train now: the run of neighbours in work whose tokens waited longest, and overdue ones."""
    options, dp = problem.options, problem.layout.dp
    if not windows:
        return []
    age, tokens = arrivals.age_steps(), problem.num_tokens
    by_work = sorted(range(len(windows)), key=lambda index: (-float(work[windows[index]].sum()), index))
    count = min(len(windows), -(-len(windows) // (options.window * dp)) * dp)
    waited = np.array([float((age[windows[index]] * tokens[windows[index]]).sum()) for index in by_work])
    runs = np.convolve(waited, np.ones(count), mode="valid")
    first = int(runs.argmax())
    overdue = [index for index in by_work if (age[windows[index]] >= options.max_delay_steps).any()]
    return sorted({*by_work[first : first + count], *overdue})


FIXED_GREEDY = Strategy(
    name="fixed_greedy",
    description="packs of fixed length with the least attention work, greedily",
    plan=partial(_plan_all, name="fixed_greedy", pack=_greedy),
    delay=partial(_plan_pool, name="fixed_greedy", pack=_greedy),
    moves_documents=lambda options: options.window > 1,
    ignores_memory=True,
)
FIXED_EXACT = Strategy(
    name="fixed_exact",
    description="packs of fixed length with the least attention work, by an exact solver",
    plan=partial(_plan_all, name="fixed_exact", pack=_exact),
    delay=partial(_plan_pool, name="fixed_exact", pack=_exact),
    options=FixedExactOptions,
    moves_documents=lambda options: options.window > 1,
    solver_limit_s=lambda options: options.own(FixedExactOptions).solver_time_limit_s,
)
