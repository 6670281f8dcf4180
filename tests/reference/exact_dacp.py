"""Exact references for Skrull's DACP and GDS on small inputs: MILPs, solved by HiGHS.

`exact_owners`: Skrull eq. 1-7 for one micro-batch, with x[k, j] = document k whole on rank j, d[k] = shared by all

    minimise  m + sum_k shared[k] d[k]              m >= sum_k gather[k] d[k],  m >= sum_k local[k] x[k, j]  for all j
    sum_j x[k, j] + d[k] = 1                        sum_k tokens[k] x[k, j] + share[k] d[k] <= bucket  for all j

`exact_micro_batches`: eq. 8-11, the same once per replica i and micro-batch b, with u[i, b] = used

    minimise T    T >= sum_b (m[i, b] + sum_k shared[k] d[k, i, b] + pack u[i, b])  for all i
    bucket · u and limit · u in place of the bucket and beside it, for the tokens of a rank and of a micro-batch

Ranks, micro-batches and replicas are interchangeable, so the k-th longest document lies in the first k of each. A
replica needs at most `1 + 2 · tokens / min(bucket, limit)` micro-batches: of two whose ranks are at most half full and
that hold half of the limit, the union fits and takes no longer. NP-hard; DACP is proved for tens of documents, GDS for
about ten, in seconds. A solver that stops early says so (`is_optimal`, `gap`).
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from evenload.errors import InfeasiblePlanError
from evenload.plan.dacp import SHARED, Groups, MicroBatch, StepDocuments, assign_owners
from evenload.plan.strategies.fixed import OPTIMAL_GAP
from reference.dacp import chosen, rank_seconds


@dataclass(frozen=True, eq=False)
class Exact:
    """A time, a bound that no answer beats, and the best answer: owners of documents (int64[n], `SHARED` = all ranks),
    or micro-batches per replica, which may have none."""

    seconds: float
    bound: float
    answer: NDArray[np.int64] | list[Groups]

    @property
    def gap(self) -> float:
        """How much better an optimum could be at most, as a share of `seconds`."""
        return 0.0 if self.seconds <= 0 else max(0.0, 1.0 - self.bound / self.seconds)

    @property
    def is_optimal(self) -> bool:
        return self.gap <= OPTIMAL_GAP


def exact_owners(batch: MicroBatch, *, time_limit_s: float = 60.0, start: NDArray[np.int64] | None = None) -> Exact:
    """Owners of the documents of one micro-batch so that the slowest rank takes the least; never worse than `start`.

    Raises:
        InfeasiblePlanError: no owners fit the bucket, or none was found within the time limit.
    """
    step = StepDocuments(batch, 1, int(batch.num_tokens.sum()))
    model = _Model(step, slots=1)
    values, bound = model.solve(time_limit_s, None if start is None else [[(np.arange(len(start)), start)]])
    owner = model.owners(values)[0][0][1]
    if start is not None and _seconds(batch, start) < _seconds(batch, owner):
        owner = start
    seconds = _seconds(batch, owner)
    return Exact(seconds, min(seconds, bound), owner)


def exact_micro_batches(step: StepDocuments, *, time_limit_s: float = 60.0, start: list[Groups] | None = None) -> Exact:
    """Replicas and micro-batches of a step, each run by the best owners, so that the slowest replica takes the least;
    never worse than `start`. Raises as `exact_owners`."""
    tokens = step.columns.num_tokens
    smallest = max(1, min(step.columns.bucket_tokens, step.limit_tokens))
    slots = min(len(tokens), 1 + 2 * int(tokens.sum()) // smallest)
    model = _Model(step, max(slots, *(len(groups) for groups in start or ([],))))
    known = None
    if start is not None:
        known = [
            [(np.array(group), assign_owners(step.columns, [group]).owner) for group in groups] for groups in start
        ]
    values, bound = model.solve(time_limit_s, known)
    answers = [model.owners(values), *([known] if known is not None else [])]
    best = min(answers, key=lambda answer: _step_seconds(step, answer))
    seconds = _step_seconds(step, best)
    groups = [[documents.tolist() for documents, _ in replica] for replica in best]
    return Exact(seconds, min(seconds, bound), groups)


Owned = list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]]
"""Per replica, per micro-batch: its documents and their owners."""


def lower_bound_s(step: StepDocuments) -> float:
    """No micro-batches are faster: the mean rank of the mean replica, with the fewest micro-batches, every document
    taking the cheaper of its two kinds."""
    columns = step.columns
    fewest = max(-(-int(columns.num_tokens.sum()) // max(1, step.limit_tokens)), 1)
    least_s = np.minimum(columns.local_s / columns.cp, columns.shared_s)
    return (float(least_s.sum()) + step.pack_s * fewest) / step.dp


def _seconds(batch: MicroBatch, owner: NDArray[np.int64]) -> float:
    return float(rank_seconds(batch, owner).max())


def _step_seconds(step: StepDocuments, answer: Owned) -> float:
    return max(
        sum(step.pack_s + _seconds(chosen(step.columns, documents), owner) for documents, owner in replica)
        for replica in answer
    )


@dataclass
class _Rows:
    """Constraints, row by row."""

    index: list[NDArray[np.int64]] = field(default_factory=list)
    value: list[NDArray[np.float64]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[Any, Any]], low: float, high: float) -> None:
        """`low <= sum of values · columns <= high`; terms are (columns, values), broadcast."""
        index = [np.atleast_1d(np.asarray(columns, np.int64)) for columns, _ in terms]
        value = [
            np.broadcast_to(np.asarray(values, np.float64), part.shape)
            for part, (_, values) in zip(index, terms, strict=True)
        ]
        self.index.append(np.concatenate(index))
        self.value.append(np.concatenate(value))
        self.low.append(low)
        self.high.append(high)


class _Model:
    """Columns: whole[k, i, b, j], shared[k, i, b], used[i, b] (binary), slowest[i, b], then T; longest document first.

    Seconds are divided by `scale`, tokens by the bucket, so that the solver sees numbers near 1.
    """

    def __init__(self, step: StepDocuments, slots: int) -> None:
        self.step, self.slots = step, slots
        batch = step.columns
        self.order = np.argsort(-batch.local_s, kind="stable")
        n, dp, cp = len(self.order), step.dp, batch.cp
        sizes = [n * dp * slots * cp, n * dp * slots, dp * slots, dp * slots, 1]
        edges = np.cumsum([0, *sizes])
        whole, shared, used, slowest, total = itertools.starmap(np.arange, itertools.pairwise(edges.tolist()))
        self.whole = whole.reshape(n, dp, slots, cp)
        self.shared = shared.reshape(n, dp, slots)
        self.used, self.slowest = used.reshape(dp, slots), slowest.reshape(dp, slots)
        self.total, self.columns = int(total[0]), int(edges[-1])
        self.scale = max(lower_bound_s(step), 1e-30)
        self.rows = _Rows()
        self._add_rows()

    def _add_rows(self) -> None:
        step, batch, rows, unlimited = self.step, self.step.columns, self.rows, np.inf
        sorted_ = chosen(batch, self.order)
        local, shared, gather = (
            column / self.scale for column in (sorted_.local_s, sorted_.shared_s, sorted_.gather_s)
        )
        bucket = max(1, batch.bucket_tokens)
        tokens, shares = batch.num_tokens[self.order] / bucket, batch.share_tokens()[self.order] / bucket
        for k in range(len(self.order)):
            rows.add([(self.whole[k].ravel(), 1.0), (self.shared[k].ravel(), 1.0)], 1.0, 1.0)
        for i in range(step.dp):
            rows.add(
                [(self.total, 1.0), (self.slowest[i], -1.0), (self.used[i], -step.pack_s / self.scale)]
                + [(self.shared[:, i, b], -shared) for b in range(self.slots)],
                0.0,
                unlimited,
            )
            for b in range(self.slots):
                rows.add([(self.slowest[i, b], 1.0), (self.shared[:, i, b], -gather)], 0.0, unlimited)
                in_slot = [(self.whole[:, i, b, j], tokens) for j in range(batch.cp)] + [(self.shared[:, i, b], tokens)]
                rows.add([*in_slot, (self.used[i, b], -step.limit_tokens / bucket)], -unlimited, 0.0)
                for j in range(batch.cp):
                    rows.add([(self.slowest[i, b], 1.0), (self.whole[:, i, b, j], -local)], 0.0, unlimited)
                    held = [(self.whole[:, i, b, j], tokens), (self.shared[:, i, b], shares)]
                    rows.add([*held, (self.used[i, b], -batch.bucket_tokens / bucket)], -unlimited, 0.0)
                if b:
                    rows.add([(self.used[i, b - 1], 1.0), (self.used[i, b], -1.0)], 0.0, unlimited)

    def solve(self, time_limit_s: float, start: Owned | None) -> tuple[NDArray[np.float64], float]:
        """The best values of all columns, and a bound; `start` is a known answer.

        Raises:
            InfeasiblePlanError: there is none, or none was found within the time limit.
        """
        solver = highspy.Highs()
        # One thread and no clock but the limit: the same answer every time unless the limit stops it.
        for option, value in (
            ("output_flag", False), ("threads", 1), ("time_limit", float(time_limit_s)),
            ("mip_rel_gap", OPTIMAL_GAP / 2), ("mip_feasibility_tolerance", 1e-9),
        ):  # fmt: skip
            solver.setOptionValue(option, value)
        solver.passModel(self._highs_model())
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = self._values(start).tolist()
            solver.setSolution(solution)
        solver.run()
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise InfeasiblePlanError(f"exact: {solver.getModelStatus()}")
        return np.array(solver.getSolution().col_value), float(info.mip_dual_bound) * self.scale

    def _highs_model(self) -> Any:
        first = np.arange(len(self.order))
        upper = np.full(self.columns, highspy.kHighsInf)
        dp_ok = np.arange(self.step.dp)[None, :] <= first[:, None]
        slot_ok = np.arange(self.slots)[None, :] <= first[:, None]
        rank_ok = np.arange(self.step.columns.cp)[None, :] <= first[:, None]
        in_slot = dp_ok[:, :, None] & slot_ok[:, None, :]
        upper[self.shared] = in_slot
        upper[self.whole] = in_slot[..., None] & rank_ok[:, None, None, :]
        upper[self.used] = 1.0
        model = highspy.HighsLp()
        rows = self.rows
        model.num_col_, model.num_row_ = self.columns, len(rows.index)
        cost = np.zeros(self.columns)
        cost[self.total] = 1.0
        lower = np.zeros(self.columns)
        lower[self.total] = lower_bound_s(self.step) / self.scale * (1 - 1e-12)
        model.col_cost_, model.col_lower_, model.col_upper_ = cost, lower, upper
        model.row_lower_, model.row_upper_ = np.array(rows.low), np.array(rows.high)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, rows.index)]).astype(np.int32)
        model.a_matrix_.index_ = np.concatenate(rows.index).astype(np.int32)
        model.a_matrix_.value_ = np.concatenate(rows.value)
        binary = int(self.used.max()) + 1
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [whole] * binary + [real] * (self.columns - binary)
        return model

    def _values(self, start: Owned) -> NDArray[np.float64]:
        """A known answer as columns, everything numbered by its longest document (the symmetry rule)."""
        values = np.zeros(self.columns)
        place = np.empty(len(self.order), np.int64)
        place[self.order] = np.arange(len(self.order))
        first = [
            min((int(place[documents].min()) for documents, _ in replica), default=len(place)) for replica in start
        ]
        for i, replica in enumerate(sorted(range(len(start)), key=first.__getitem__)):
            groups = sorted(start[replica], key=lambda group: int(place[group[0]].min()))
            for b, (documents, owner) in enumerate(groups):
                rank_of: dict[int, int] = {}
                for document, rank in sorted(zip(place[documents].tolist(), owner.tolist(), strict=True)):
                    if rank == SHARED:
                        values[self.shared[document, i, b]] = 1.0
                    else:
                        values[self.whole[document, i, b, rank_of.setdefault(rank, len(rank_of))]] = 1.0
                group = chosen(self.step.columns, documents)
                shared_s = float(group.shared_s[owner == SHARED].sum())
                values[self.used[i, b]] = 1.0
                values[self.slowest[i, b]] = (_seconds(group, owner) - shared_s) / self.scale
        values[self.total] = _step_seconds(self.step, start) / self.scale
        return values

    def owners(self, values: NDArray[np.float64]) -> Owned:
        """The answer that column values stand for."""
        found: Owned = []
        for i in range(self.step.dp):
            found.append([])
            for b in range(self.slots):
                kinds = np.concatenate([values[self.whole[:, i, b]], values[self.shared[:, i, b]][:, None]], axis=1)
                mine = np.flatnonzero(kinds.max(axis=1) > 0.5)
                if len(mine):
                    mine = mine[np.argsort(self.order[mine])]
                    kind = kinds[mine].argmax(axis=1)
                    found[-1].append((self.order[mine], np.where(kind == self.step.columns.cp, SHARED, kind)))
        return found
