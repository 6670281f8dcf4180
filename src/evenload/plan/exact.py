"""Exact references for the heuristics, on small inputs: what tests and `docs/planner.md` measure gaps against.

`exact_groups` is one MILP, solved by HiGHS (`pip install evenload[exact]`), that covers

    fixed-length packing      WLB eq. 1     work = attention work, capacity = the window
    variable-length packing   WLB eq. 2     work = W_a + W_l seconds, capacity = S_max
    DP assignment             SlimPack §4.1.1   work = forward + backward seconds, no capacity

    minimise t    x[i, j] binary, sum_j x[i, j] = 1, sum_i work[i] x[i, j] <= t, sum_i tokens[i] x[i, j] <= capacity

Groups are interchangeable, so the document of the k-th most work may lie in the first k groups only, which takes
out a factor of num_groups! of equal solutions; and t is at least the mean group and the largest document. Still
NP-hard (number partition): tens of documents in seconds, hundreds only as far as the time limit goes. A solver
that stops early says so (`is_optimal`, `gap`).

`exact_slice_bound` is the optimum of slice packing in a fixed document order, without a solver: the least t for
which filling every pack as full as t and the token limit allow needs at most `num_packs` packs. Filling further
never hurts, because a slice that starts later has less work for the same end. O(packs · log²) a call.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.plan.bin_packing import longest_first
from evenload.types.work import WorkCurve

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
        """The solver proved it."""
        return self.gap <= OPTIMAL_GAP


def exact_groups(
    work: NDArray[np.float64],
    num_groups: int,
    *,
    num_tokens: NDArray[np.int64] | None = None,
    capacity: int | None = None,
    time_limit_s: float = 60.0,
    start: list[list[int]] | None = None,
) -> ExactGroups:
    """Items into groups so that the largest group has the least work.

    Args:
        work: float64[n], finite, not negative.
        num_groups: at least 1; groups may stay empty.
        num_tokens: int64[n] and `capacity`: token limit of every group; both or neither.
        time_limit_s: the solver stops here with the best it has.
        start: a known grouping of at most `num_groups` groups; the answer is never worse. Default: LPT's, where it
            fits.

    Raises:
        ConfigError: highspy is not installed, or shapes and limits that make no sense.
        InfeasiblePlanError: the items do not fit the groups, or no grouping was found within the time limit.
    """
    work = np.asarray(work, np.float64)
    if num_groups < 1 or not time_limit_s > 0:
        raise ConfigError(f"exact: num_groups {num_groups} must be at least 1 and time_limit_s {time_limit_s} above 0")
    if work.ndim != 1 or not np.isfinite(work).all() or (work < 0).any():
        raise ConfigError(f"exact: work of shape {work.shape} must be one finite column without negatives")
    if (num_tokens is None) != (capacity is None) or (num_tokens is not None and len(num_tokens) != len(work)):
        raise ConfigError("exact: give num_tokens (one per item) and capacity together, or neither")
    highspy = require_highspy()
    if not len(work):
        return ExactGroups(((),) * num_groups, 0.0, 0.0)
    if start is None:
        start = longest_first(work, num_groups, num_tokens=num_tokens, capacity=capacity)
    start = [group for group in start if group]
    floor = max(float(work.sum()) / num_groups, float(work.max()))
    known = _largest(work, start) if len(start) <= num_groups else math.inf
    if known <= floor * (1 + OPTIMAL_GAP):
        return _result(work, start, num_groups, floor)
    order = np.argsort(-work, kind="stable")
    model, scale = _model(highspy, work[order], num_groups, None if num_tokens is None else num_tokens[order], capacity)
    solver = highspy.Highs()
    # One thread and no clock but the limit: the same answer every time unless the limit stops it.
    for option, value in (
        ("output_flag", False), ("threads", 1), ("time_limit", float(time_limit_s)), ("mip_rel_gap", OPTIMAL_GAP / 2),
    ):  # fmt: skip
        solver.setOptionValue(option, value)
    solver.passModel(model)
    if known < math.inf:
        solution = highspy.HighsSolution()
        solution.col_value = _start_values(work[order], order, start, num_groups, known / scale)
        solver.setSolution(solution)
    solver.run()
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        raise InfeasiblePlanError(
            f"exact: {len(work)} documents of {int(np.sum(num_tokens))} tokens do not fit {num_groups} packs of "  # type: ignore[arg-type]
            f"{capacity} tokens; ask for more packs or raise max_pack_tokens"
        )
    info = solver.getInfo()
    found = None
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        values = np.array(solver.getSolution().col_value)[:-1].reshape(len(work), num_groups)
        chosen = values.argmax(axis=1)
        found = [np.sort(order[chosen == group]).tolist() for group in range(num_groups)]
    # Rounding in the solver must not lose what was known before.
    best = min((groups for groups in (found, start) if groups is not None and len(groups) <= num_groups),
               key=lambda groups: _largest(work, groups), default=None)  # fmt: skip
    if best is None:
        raise InfeasiblePlanError(
            f"exact: no grouping of {len(work)} documents into {num_groups} packs of {capacity} tokens found within "
            f"{time_limit_s:g} s; raise the time limit or the number of packs"
        )
    return _result(work, best, num_groups, max(floor, float(info.mip_dual_bound) * scale))


def exact_slice_bound(
    num_tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    work: WorkCurve,
    num_packs: int,
    *,
    max_pack_tokens: int | None = None,
) -> float:
    """Least possible work of the largest pack when documents are cut freely, in this order, into `num_packs` packs.

    Args:
        num_tokens: int64[n]; order: document indices as they are dealt.
        work: of a token range; a slice costs its constant.

    Returns:
        Seconds, to a relative 1e-9; infinite when the token limit does not allow `num_packs` packs.
    """
    lengths = [int(num_tokens[index]) for index in order]
    cap = sum(lengths) if max_pack_tokens is None else max_pack_tokens
    if sum(lengths) > cap * num_packs:
        return math.inf
    high = sum(work.slice_work_s(0, n) for n in lengths)
    if not high:
        return 0.0
    low = 0.0
    # Cuts by the token limit alone may add slice constants, so the whole work in one pack is not always enough.
    while _packs_needed(lengths, work, high, cap, num_packs) > num_packs:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _packs_needed(lengths, work, middle, cap, num_packs) <= num_packs:
            high = middle
        else:
            low = middle
    return high


def _packs_needed(lengths: list[int], work: WorkCurve, limit_s: float, cap: int, stop_after: int) -> int:
    """Packs when each is filled to `limit_s` and `cap`; `stop_after + 1` stands for "too many"."""
    packs, room_s, room = 1, limit_s, cap
    for length in lengths:
        start = 0
        while start < length:
            stop = _furthest(work, start, min(length, start + room), room_s)
            if stop == start:
                if room == cap and room_s == limit_s:
                    return stop_after + 1  # not even one token fits an empty pack
                packs, room_s, room = packs + 1, limit_s, cap
                if packs > stop_after:
                    return packs
                continue
            room_s -= work.slice_work_s(start, stop)
            room -= stop - start
            start = stop
    return packs


def _furthest(work: WorkCurve, start: int, most: int, room_s: float) -> int:
    """Largest `stop <= most` whose slice fits `room_s`; `start` when none does."""
    low, high = start, most
    while low < high:
        middle = (low + high + 1) // 2
        if work.slice_work_s(start, middle) <= room_s:
            low = middle
        else:
            high = middle - 1
    return low


def require_highspy() -> Any:
    """The solver's module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import highspy
    except ImportError as error:
        raise ConfigError(
            "exact solutions need the package highspy, which is not installed; pip install 'evenload[exact]'"
        ) from error
    return highspy


def _model(
    highspy: Any,
    work: NDArray[np.float64],
    num_groups: int,
    num_tokens: NDArray[np.int64] | None,
    capacity: int | None,
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
    indices = [groups[i] for i in range(n)]
    values = [np.ones(m)] * n
    row_lower, row_upper = [1.0] * n, [1.0] * n
    for group in range(m):
        indices.append(np.append(groups[:, group], columns - 1))
        values.append(np.append(work / scale, -1.0))
        row_lower.append(-highspy.kHighsInf)
        row_upper.append(0.0)
    if num_tokens is not None and capacity is not None:
        for group in range(m):
            indices.append(groups[:, group])
            values.append(num_tokens.astype(np.float64))
            row_lower.append(-highspy.kHighsInf)
            row_upper.append(float(capacity))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, len(indices)
    cost = np.zeros(columns)
    cost[-1] = 1.0
    model.col_cost_, model.col_lower_, model.col_upper_ = cost, lower, upper
    model.row_lower_, model.row_upper_ = np.array(row_lower), np.array(row_upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.cumsum([0, *map(len, indices)]).astype(np.int32)
    model.a_matrix_.index_ = np.concatenate(indices).astype(np.int32)
    model.a_matrix_.value_ = np.concatenate(values)
    model.integrality_ = [highspy.HighsVarType.kInteger] * (columns - 1) + [highspy.HighsVarType.kContinuous]
    return model, scale


def _start_values(
    work: NDArray[np.float64], order: NDArray[np.int64], start: list[list[int]], num_groups: int, objective: float
) -> list[float]:
    """`start` as column values, its groups numbered by their first item in `order` (the symmetry rule)."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    values = np.zeros((len(work), num_groups))
    used = sorted((group for group in start if group), key=lambda group: int(rank[group].min()))
    for number, group in enumerate(used):
        values[rank[group], number] = 1.0
    return [*values.ravel().tolist(), objective]


def _largest(work: NDArray[np.float64], groups: list[list[int]]) -> float:
    return max((float(work[group].sum()) for group in groups if group), default=0.0)


def _result(work: NDArray[np.float64], groups: list[list[int]], num_groups: int, bound: float) -> ExactGroups:
    padded = [tuple(sorted(group)) for group in groups] + [()] * (num_groups - len(groups))
    objective = _largest(work, groups)
    return ExactGroups(tuple(padded), objective, min(bound, objective))
