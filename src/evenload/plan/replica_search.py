"""`ReplicaSearch`: trials of one replica's documents, priced and simulated once each (`plan.auto`)."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload.cost.split_backward import split_backward
from evenload.plan.bin_packing import longest_first
from evenload.plan.candidate import UNLIMITED_BYTES, Candidate, candidate, packflow_candidate, pipeline_tasks
from evenload.plan.chain_free import chain_free_columns, work_below
from evenload.plan.pack_halving import halve_pack
from evenload.plan.partition import partition_by_work
from evenload.plan.problem import StepProblem
from evenload.plan.slimpack import ALIGN_FROM_TILES
from evenload.plan.trial_space import Cut, Setting, Trial, neighbours
from evenload.schedule.packflow import packflow_list
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.pipeline import PipelineTasks
from evenload.types.work import WorkCurve

NEAR_BOUND = 1.02
"""A replica whose makespan is within this of its work spread over its ranks is not searched further."""

BEAM = 6
"""Best trials whose neighbours are tried."""


def idle_candidate(problem: StepProblem) -> Candidate:
    """Of a replica without documents."""
    empty = whole_document_columns([], problem.num_tokens[:0])
    tasks = pipeline_tasks(problem.costs, empty, empty, problem.num_tokens[:0])
    return packflow_candidate("no documents", empty, empty, tasks, "list", problem.cap_bytes, problem.options)


@dataclass(frozen=True, eq=False)
class _Priced:
    forward: SliceColumns
    backward: SliceColumns
    tasks: PipelineTasks


class ReplicaSearch:
    """The best candidate found so far for some documents.

    Args:
        documents: int64[k], indices into the problem's arrays.
    """

    def __init__(self, problem: StepProblem, documents: NDArray[np.int64]) -> None:
        self.problem = problem
        self.documents = documents
        self.num_tokens = problem.num_tokens[documents]
        self.policy = problem.policy_of(documents)
        self.work_s = float(problem.document_s[documents].sum())
        self.best: Candidate | None = None
        self.num_simulated = 0
        self.tried: dict[Trial, tuple[int, float] | None] = {}
        self._priced: dict[Setting, _Priced | None] = {}
        self._expanded: set[Trial] = set()

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Cuts that the model and the token limit allow; the most promising first."""
        limit = self.problem.options.max_pack_tokens
        whole = limit is None or not len(self.num_tokens) or int(self.num_tokens.max()) <= limit
        sliced: tuple[Cut, ...] = ("symmetric", "asymmetric") if self.problem.costs.model.causal else ()
        return (*sliced, "whole") if whole else sliced

    def seed(self, found: Candidate) -> None:
        """A candidate of another strategy for the same documents."""
        if self.best is None or found.score() < self.best.score():
            self.best = found

    def score(self) -> tuple[int, float]:
        """Of the best; infinitely bad before there is one."""
        return self.best.score() if self.best else (UNLIMITED_BYTES, float("inf"))

    def try_trial(self, trial: Trial) -> bool:
        """Simulate a trial unless it was; whether it is the new best."""
        if trial in self.tried:
            return False
        priced = self._price(trial.setting)
        if priced is None or (trial.split and priced.tasks.split is None):
            self.tried[trial] = None
            return False
        self.num_simulated += 1
        options, cap_bytes = self.problem.options, self.problem.cap_bytes
        tasks = priced.tasks if trial.split else replace(priced.tasks, split=None)
        cap = np.full(tasks.num_ranks, UNLIMITED_BYTES, np.int64) if cap_bytes is None else cap_bytes
        actions = packflow_list(
            tasks,
            cap_bytes=cap,
            alternate=trial.alternate,
            lookahead=trial.lookahead,
            split=trial.split,
            backend=options.backend,
        )
        counts = f"{priced.forward.num_packs} forward and {priced.backward.num_packs} backward packs"
        label = f"{counts}, {trial.describe()}"
        found = candidate(label, priced.forward, priced.backward, tasks, actions, cap_bytes, options, self.policy)
        self.tried[trial] = found.score()
        if found.score() >= self.score():
            return False
        self.best = found
        return True

    def ranking(self) -> list[Trial]:
        """Simulated trials, best first."""
        scores = {trial: score for trial, score in self.tried.items() if score is not None}
        return sorted(scores, key=scores.__getitem__)

    def improve(self, budget: int) -> bool:
        """Expand the best trials, best first, while the budget of simulations lasts; whether the best got better.

        A trial is expanded by trying its neighbours. It ends when the `BEAM` best trials are all expanded, so that one
        local optimum does not end the search.
        """
        improved, stop_at = False, self.num_simulated + budget
        while not self.is_near_bound():
            origin = next((trial for trial in self.ranking()[:BEAM] if trial not in self._expanded), None)
            if origin is None:
                break
            self._expanded.add(origin)
            for trial in neighbours(
                origin, pp=self.problem.layout.pp, cuts=self.cuts, may_split=not self.problem.options.executable
            ):
                if self.num_simulated >= stop_at:
                    return improved
                improved |= self.try_trial(trial)
        return improved

    def is_near_bound(self) -> bool:
        """Within memory and within `NEAR_BOUND` of the work on every rank.

        Not of "work + first forward + last backward" (oracle §7): those are the candidate's own packs, so few large
        packs would pass.
        """
        if self.best is None or self.best.excess_bytes:
            return False
        return self.best.makespan_s <= NEAR_BOUND * self.work_s / self.best.tasks.num_ranks

    def _price(self, setting: Setting) -> _Priced | None:
        if setting not in self._priced:
            packs = self._tapered(setting)
            if packs is None:
                self._priced[setting] = None
            else:
                tasks = pipeline_tasks(self.problem.costs, *packs, self.num_tokens, self.policy)
                if not self.problem.options.executable and self.problem.layout.pp > 1:
                    tasks = replace(tasks, split=split_backward(self.problem.costs, tasks, packs[1]))
                self._priced[setting] = _Priced(*packs, tasks)
        return self._priced[setting]

    def _tapered(self, setting: Setting) -> tuple[SliceColumns, SliceColumns] | None:
        packs = self._packs(setting)
        if packs is None or setting.taper == (0, 0) or not packs[0].num_packs:
            return packs
        forward, backward = packs
        first, last = setting.taper
        may_cut = setting.cut != "whole"
        low = self.problem.options.min_slice_tokens
        for _ in range(first):
            curve = self.problem.costs.forward_work()
            halved = halve_pack(forward, 0, curve, backward=False, min_slice_tokens=low, may_cut=may_cut)
            forward = halved or forward
        for _ in range(last):
            curve, at = self.problem.costs.backward_work(), backward.num_packs - 1
            halved = halve_pack(backward, at, curve, backward=True, min_slice_tokens=low, may_cut=may_cut)
            backward = halved or backward
        return forward, backward

    def _packs(self, setting: Setting) -> tuple[SliceColumns, SliceColumns] | None:
        problem, options = self.problem, self.problem.options
        forward, backward = problem.costs.forward_work(), problem.costs.backward_work()
        if setting.token_weight != 1:
            forward, backward = (
                replace(curve, linear_s=setting.token_weight * curve.linear_s) for curve in (forward, backward)
            )
        limits = {
            "min_slice_tokens": options.min_slice_tokens,
            "max_pack_tokens": options.max_pack_tokens,
            "backend": options.backend,
        }
        if setting.cut == "whole":
            return self._whole(setting.count, (forward, backward))
        if setting.cut == "symmetric":
            align = self._align(setting.count, forward, backward)
            return chain_free_columns(self.num_tokens, (forward, backward), setting.count, align=align, **limits)
        order = np.argsort(-work_below((forward,), self.num_tokens), kind="stable").astype(np.int32)
        parts = [
            partition_by_work(
                self.num_tokens,
                order,
                curve,
                setting.count,
                align=self._align(setting.count, curve),
                last_first=last_first,
                **limits,
            )
            for curve, last_first in ((forward, False), (backward, True))
        ]
        return parts[0], parts[1]

    def _whole(self, count: int, curves: tuple[WorkCurve, WorkCurve]) -> tuple[SliceColumns, SliceColumns]:
        options, work = self.problem.options, work_below(curves, self.num_tokens)
        limit = options.max_pack_tokens
        tokens = None if limit is None else self.num_tokens
        groups = longest_first(work, count, num_tokens=tokens, capacity=limit, backend=options.backend)
        # Dear packs first: the short ones at the end drain the pipeline fast.
        ordered = sorted((group for group in groups if group), key=lambda group: -float(work[group].sum()))
        columns = whole_document_columns(ordered, self.num_tokens)
        return columns, columns

    def _align(self, count: int, *curves: WorkCurve) -> int:
        """The attention tile where slices are long compared with it, else 1 (as `slimpack`)."""
        tile, limit = self.problem.costs.coefficients.attention_tile, self.problem.options.max_pack_tokens
        if tile == 1 or (limit is not None and limit < ALIGN_FROM_TILES * tile):
            return 1
        longest = int(self.num_tokens.max())
        edge = work_below(curves, np.array([longest - 1, longest]))
        target = float(work_below(curves, self.num_tokens).sum()) / count
        return tile if target >= ALIGN_FROM_TILES * tile * float(edge[1] - edge[0]) else 1
