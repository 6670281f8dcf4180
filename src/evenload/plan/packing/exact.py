"""`exact_groups`: WLB eq. 1 as one MILP, solved by HiGHS (`pip install evenload[exact]`).

    minimise t    x[i, j] binary, sum_j x[i, j] = 1, sum_i work[i] x[i, j] <= t, sum_i tokens[i] x[i, j] <= capacity

Groups are interchangeable, so the document of the k-th most work may lie in the first k groups only, which takes
out a factor of num_groups! of equal solutions; and t is at least the mean group and the largest document. Still
NP-hard (number partition): tens of documents in seconds, hundreds only as far as the time limit goes. A solver
that stops early says so (`is_optimal`, `gap`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError

OPTIMAL_GAP = 1e-6
"""Relative distance to the bound below which a solution counts as optimal."""


@dataclass(frozen=True)
class ExactGroups:
    """The best groups found.

    Args:
        groups: per group its item indices, ascending; may be empty.
        objective: work of the largest group.
        bound: no grouping can have a smaller objective.
    """

    groups: tuple[tuple[int, ...], ...]
    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """How much better an optimum could be at most, as a share of the objective."""
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
    """Items into as many groups as `start` has, so that the largest group has the least work.

    Args:
        work: float64[n], finite, not negative.
        num_tokens: int64[n].
        capacity: tokens that a group may hold.
        start: a known grouping within the capacity, groups may be empty; the answer is never worse.
        time_limit_s: the solver stops here with the best it has.

    Raises:
        ConfigError: highspy is not installed.
    """
    highspy = require_highspy()
    count, num_groups = len(work), len(start)
    if not count:
        return ExactGroups(((),) * num_groups, 0.0, 0.0)
    floor = max(float(work.sum()) / num_groups, float(work.max()))
    known = _largest(work, start)
    if known <= floor * (1 + OPTIMAL_GAP):
        return _result(work, start, floor)
    order = np.argsort(-work, kind="stable")
    model, scale = _model(highspy, work[order], num_groups, num_tokens[order], capacity)
    solver = highspy.Highs()
    # One thread and no clock but the limit: the same answer every time unless the limit stops it.
    for option, value in (
        ("output_flag", False), ("threads", 1), ("time_limit", float(time_limit_s)), ("mip_rel_gap", OPTIMAL_GAP / 2),
    ):  # fmt: skip
        solver.setOptionValue(option, value)
    solver.passModel(model)
    solution = highspy.HighsSolution()
    solution.col_value = _start_values(order, start, known / scale)
    solver.setSolution(solution)
    solver.run()
    info = solver.getInfo()
    best = start
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        chosen = np.array(solver.getSolution().col_value)[:-1].reshape(count, num_groups).argmax(axis=1)
        found = [order[chosen == group].tolist() for group in range(num_groups)]
        # Rounding in the solver must not lose what was known before.
        best = min(found, start, key=lambda groups: _largest(work, groups))
    return _result(work, best, max(floor, float(info.mip_dual_bound) * scale))


def require_highspy() -> Any:
    """The solver's module; a `ConfigError` where it is not installed."""
    try:
        import highspy
    except ImportError as error:
        raise ConfigError(
            "exact solutions need the package highspy, which is not installed; pip install 'evenload[exact]'"
        ) from error
    return highspy


def _model(
    highspy: Any, work: NDArray[np.float64], num_groups: int, num_tokens: NDArray[np.int64], capacity: int
) -> tuple[Any, float]:
    """HiGHS' columns are x row by row, then t; works are divided by `scale` so that t is near 1."""
    n, m = len(work), num_groups
    scale = float(work.sum()) / m
    columns = n * m + 1
    groups = np.arange(n * m).reshape(n, m)
    upper = np.ones(columns)
    upper[:-1] = (np.arange(m)[None, :] <= np.arange(n)[:, None]).ravel()
    lower = np.zeros(columns)
    lower[-1], upper[-1] = max(1.0, float(work.max()) / scale), highspy.kHighsInf
    works = [(np.append(groups[:, group], columns - 1), np.append(work / scale, -1.0)) for group in range(m)]
    tokens = [(groups[:, group], num_tokens.astype(np.float64)) for group in range(m)]
    rows = [(groups[i], np.ones(m)) for i in range(n)] + works + tokens
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, len(rows)
    cost = np.zeros(columns)
    cost[-1] = 1.0
    model.col_cost_, model.col_lower_, model.col_upper_ = cost, lower, upper
    model.row_lower_ = np.repeat([1.0, -highspy.kHighsInf, -highspy.kHighsInf], [n, m, m])
    model.row_upper_ = np.repeat([1.0, 0.0, float(capacity)], [n, m, m])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.cumsum([0, *(len(index) for index, _ in rows)]).astype(np.int32)
    model.a_matrix_.index_ = np.concatenate([index for index, _ in rows]).astype(np.int32)
    model.a_matrix_.value_ = np.concatenate([value for _, value in rows])
    model.integrality_ = [highspy.HighsVarType.kInteger] * (columns - 1) + [highspy.HighsVarType.kContinuous]
    return model, scale


def _start_values(order: NDArray[np.int64], start: list[list[int]], objective: float) -> list[float]:
    """`start` as column values, its groups numbered by their first item in `order` (the symmetry rule)."""
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
