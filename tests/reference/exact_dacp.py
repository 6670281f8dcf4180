"""Exact references for Skrull's DACP and GDS on small inputs: MILPs, solved by HiGHS.

`exact_owners`: Skrull eq. 1-7 for one micro-batch, with x[k, j] = document k whole on rank j, d[k] = shared by all

    minimise  m + sum_k shared[k] d[k]              m >= sum_k gather[k] d[k],  m >= sum_k local[k] x[k, j]  for all j
    sum_j x[k, j] + d[k] = 1                        sum_k tokens[k] x[k, j] + share[k] d[k] <= bucket  for all j

`exact_micro_batches`: eq. 8-11, the same once per replica i and micro-batch b, with u[i, b] = used

    minimise T    T >= sum_b (m[i, b] + sum_k shared[k] d[k, i, b] + pack u[i, b])  for all i
    bucket · u and limit · u in place of the bucket and beside it, for the tokens of a rank and of a micro-batch

Ranks, micro-batches and replicas are interchangeable, so the k-th longest document lies in the first k of each. A
replica needs at most `1 + 2 · tokens / min(bucket, limit)` micro-batches: of two that are at most half full the union
fits and takes no longer. NP-hard: tens of documents for DACP, about ten for GDS, in seconds; `is_optimal` says so.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray

from evenload.errors import InfeasiblePlanError
from evenload.planning.strategies.fixed import OPTIMAL_GAP
from evenload.planning.strategies.skrull import SHARED, Groups, MicroBatch, StepDocuments, assign_owners
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
    Raises as `_Model.solve`."""
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
    by_group = lambda group: (np.array(group), assign_owners(step.columns, [group]).owner)  # noqa: E731
    known = None if start is None else [list(map(by_group, groups)) for groups in start]
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


class _Model:
    """Columns: whole[k, i, b, j], shared[k, i, b], used[i, b] (binary), slowest[i, b], then T; longest document first.
    Seconds are divided by `scale`, tokens by the bucket, so that the solver sees numbers near 1."""

    def __init__(self, step: StepDocuments, slots: int) -> None:
        self.step, self.slots = step, slots
        self.order = np.argsort(-step.columns.local_s, kind="stable")
        n, dp, cp = len(self.order), step.dp, step.columns.cp
        edges = np.cumsum([0, n * dp * slots * cp, n * dp * slots, dp * slots, dp * slots, 1]).tolist()
        whole, shared, used, slowest, total = itertools.starmap(np.arange, itertools.pairwise(edges))
        self.whole, self.shared = whole.reshape(n, dp, slots, cp), shared.reshape(n, dp, slots)
        self.used, self.slowest = used.reshape(dp, slots), slowest.reshape(dp, slots)
        self.total, self.columns = int(total[0]), edges[-1]
        self.scale = max(lower_bound_s(step), 1e-30)
        self.solver = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        first = np.arange(n)[:, None, None, None]
        in_slot = (np.arange(dp)[:, None, None] <= first) & (np.arange(slots)[:, None] <= first)
        lower, upper = np.zeros(self.columns), np.full(self.columns, highspy.kHighsInf)
        upper[self.whole], upper[self.shared] = in_slot & (np.arange(cp) <= first), in_slot[..., 0]
        upper[self.used] = 1.0
        lower[self.total] = lower_bound_s(step) / self.scale * (1 - 1e-12)
        self.solver.addVars(self.columns, lower, upper)
        self.solver.changeColCost(self.total, 1.0)
        for column in range(int(slowest[0])):
            self.solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        self._add_rows()

    def _add(self, terms: list[tuple[Any, Any]], low: float, high: float) -> None:
        """Require `low <= sum of values · columns <= high`; terms are (columns, values), broadcast."""
        pairs = [np.broadcast_arrays(*term) for term in terms]
        index, value = (np.concatenate([pair[at].ravel() for pair in pairs]) for at in (0, 1))
        self.solver.addRow(low, high, len(index), index.astype(np.int32), value.astype(np.float64))

    def _add_rows(self) -> None:
        step, batch, unlimited = self.step, self.step.columns, highspy.kHighsInf
        ordered, bucket = chosen(batch, self.order), max(1, batch.bucket_tokens)
        local, shared, gather = (part / self.scale for part in (ordered.local_s, ordered.shared_s, ordered.gather_s))
        tokens, shares = ordered.num_tokens / bucket, ordered.share_tokens() / bucket
        for k in range(len(self.order)):
            self._add([(self.whole[k], 1.0), (self.shared[k], 1.0)], 1.0, 1.0)
        for i in range(step.dp):
            of_slots = [(self.slowest[i], -1.0), (self.used[i], -step.pack_s / self.scale)]
            self._add([(self.total, 1.0), *of_slots, (self.shared[:, i], -shared[:, None])], 0.0, unlimited)
            for b in range(self.slots):
                self._add([(self.slowest[i, b], 1.0), (self.shared[:, i, b], -gather)], 0.0, unlimited)
                in_slot = [(self.whole[:, i, b], tokens[:, None]), (self.shared[:, i, b], tokens)]
                self._add([*in_slot, (self.used[i, b], -step.limit_tokens / bucket)], -unlimited, 0.0)
                for j in range(batch.cp):
                    self._add([(self.slowest[i, b], 1.0), (self.whole[:, i, b, j], -local)], 0.0, unlimited)
                    held = [(self.whole[:, i, b, j], tokens), (self.shared[:, i, b], shares)]
                    self._add([*held, (self.used[i, b], -batch.bucket_tokens / bucket)], -unlimited, 0.0)
                if b:
                    self._add([(self.used[i, b - 1], 1.0), (self.used[i, b], -1.0)], 0.0, unlimited)

    def solve(self, time_limit_s: float, start: Owned | None) -> tuple[NDArray[np.float64], float]:
        """Return the best values of all columns, from a known answer, and a bound; raise `InfeasiblePlanError` where
        there are none, or none was found within the time limit."""
        # One thread and no clock but the limit: the same answer every time unless the limit stops it.
        for option, value in (
            ("threads", 1), ("time_limit", float(time_limit_s)),
            ("mip_rel_gap", OPTIMAL_GAP / 2), ("mip_feasibility_tolerance", 1e-9),
        ):  # fmt: skip
            self.solver.setOptionValue(option, value)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = self._values(start).tolist()
            self.solver.setSolution(solution)
        self.solver.run()
        info = self.solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise InfeasiblePlanError(f"exact: {self.solver.getModelStatus()}")
        return np.array(self.solver.getSolution().col_value), float(info.mip_dual_bound) * self.scale

    def _values(self, start: Owned) -> NDArray[np.float64]:
        """A known answer as columns, everything numbered by its longest document (the symmetry rule)."""
        values = np.zeros(self.columns)
        place = np.argsort(self.order)
        replicas = [sorted(replica, key=lambda group: int(place[group[0]].min())) for replica in start]
        replicas.sort(key=lambda groups: int(place[groups[0][0]].min()) if groups else len(place))
        for i, groups in enumerate(replicas):
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
        result: Owned = [[] for _ in range(self.step.dp)]
        for i, b in np.ndindex(self.step.dp, self.slots):
            kinds = np.concatenate([values[self.whole[:, i, b]], values[self.shared[:, i, b]][:, None]], axis=1)
            mine = np.flatnonzero(kinds.max(axis=1) > 0.5)
            if len(mine):
                mine = mine[np.argsort(self.order[mine])]
                kind = kinds[mine].argmax(axis=1)
                result[i].append((self.order[mine], np.where(kind == self.step.columns.cp, SHARED, kind)))
        return result
