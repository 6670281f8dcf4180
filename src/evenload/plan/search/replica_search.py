"""`ReplicaSearch`: which packs and schedule run some documents best, trial by trial; and `score`, which rates trials.

The core cuts, prices, schedules and simulates a trial in one go, many trials of many replicas in one call on several
threads (`native/trials.cpp`); only the chosen trial is made again as a `Candidate`. About 60 us a trial of 64
documents, 64 packs and 4 stages. `tests/reference/trial_scores.py` scores a trial step by step in Python.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.pipeline_tasks import pipeline_tasks, require_links_of_group
from evenload.plan.problem.candidate import Candidate, imbalance, scheduled_candidate
from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.search.trial_packs import ALIGN_FROM_TILES, NO_TOKEN_LIMIT, cut_rules, trial_packs
from evenload.plan.search.trial_space import Cut, Setting, Trial, neighbours, trial_rows
from evenload.plan.search.usable_cores import usable_cores
from evenload.schedule.packflow import LIST
from evenload.schedule.schedule_rule import UNLIMITED_BYTES
from evenload.types.columns import whole_document_columns

NEAR_BOUND = 1.02
"""A replica whose makespan is within this of its work spread over its ranks is not searched further."""
BEAM = 6
"""Best trials whose neighbours are tried."""
PARALLEL_TRIALS = 8
"""Fewer are not worth a second thread."""


class TrialScore(NamedTuple):
    """What a trial is worth; `excess_bytes` and `makespan_s` first, so that smaller is better.

    Args:
        excess_bytes: above the memory limit on the worst rank.
        imbalance_forward, imbalance_backward: max/mean pack time on the slowest stage.
    """

    excess_bytes: int
    makespan_s: float
    imbalance_forward: float
    imbalance_backward: float


KnownScores = dict[tuple[int, bytes], dict["Trial", "TrialScore | None"]]
"""By the ranks that share documents, and the documents."""
_KNOWN_SCORES: WeakKeyDictionary[StepProblem, KnownScores] = WeakKeyDictionary()
NO_SCORE = TrialScore(UNLIMITED_BYTES, float("inf"), float("inf"), float("inf"))


def known_scores(problem: StepProblem) -> KnownScores:
    """What all searches of a problem found so far, kept as long as the problem.

    `slimpack` and `auto` rate nearly the same trials, and a step that exceeds host memory is searched again under
    policies that were rated before.
    """
    return _KNOWN_SCORES.setdefault(problem, {})


def by_time(score: TrialScore) -> tuple[int, float]:
    return score.excess_bytes, score.makespan_s


class ReplicaSearch:
    """What is known about some documents.

    Args:
        documents: int64[k], indices into the problem's arrays.
        ranks: that share every slice; default: the context-parallel ranks of the layout.
        worth: how trials are ranked, smaller is better.
        known: scores that other searches of the same problem found, and where this one leaves its own.
    """

    def __init__(
        self,
        problem: StepProblem,
        documents: NDArray[np.int64],
        ranks: int | None = None,
        worth: Callable[[TrialScore], tuple[int, float]] = by_time,
        known: KnownScores | None = None,
    ) -> None:
        self.problem = problem
        self.pool = known
        self.ranks = problem.layout.cp if ranks is None else ranks
        key = (self.ranks, documents.tobytes())
        self.known: dict[Trial, TrialScore | None] = {} if known is None else known.setdefault(key, {})
        self.worth = worth
        self.documents = documents
        self.num_tokens = np.ascontiguousarray(problem.num_tokens[documents])
        self.policy = problem.policy_of(documents)
        self.scores: dict[Trial, TrialScore | None] = {}
        self._expanded: set[Trial] = set()
        self._ranking: list[Trial] | None = None

    @functools.cached_property
    def work_s(self) -> float:
        """Forward + backward through the whole pipeline, of one of the ranks that share it."""
        problem = self.problem
        if self.ranks == problem.layout.cp:
            return float(problem.document_s[self.documents].sum())
        return float(problem.costs.document_seconds(self.num_tokens, self.policy, ranks=self.ranks).sum())

    @functools.cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Cuts that the model and the token limit allow; the most promising first."""
        limit = self.problem.options.max_pack_tokens
        whole = limit is None or not len(self.num_tokens) or int(self.num_tokens.max()) <= limit
        sliced: tuple[Cut, ...] = ("symmetric", "asymmetric") if self.problem.costs.model.causal else ()
        return (*sliced, "whole") if whole else sliced

    def add(self, trial: Trial, found: TrialScore | None) -> None:
        """Record what a trial is worth; None = its packs do not exist."""
        self.scores[trial] = self.known[trial] = found
        self._ranking = None

    def rank_by(self, worth: Callable[[TrialScore], tuple[int, float]]) -> None:
        self.worth, self._ranking = worth, None

    def ranking(self) -> list[Trial]:
        if self._ranking is None:
            worth = {trial: self.worth(score) for trial, score in self.scores.items() if score is not None}
            self._ranking = sorted(worth, key=worth.__getitem__)
        return self._ranking

    def best(self) -> TrialScore:
        """Score of the best trial; infinitely bad before there is one, nothing to do without documents."""
        if not len(self.documents):
            return TrialScore(0, 0.0, 1.0, 1.0)
        ranking = self.ranking()
        return (self.scores[ranking[0]] or NO_SCORE) if ranking else NO_SCORE

    def is_near_bound(self) -> bool:
        """Within memory and within `NEAR_BOUND` of the work on every rank.

        Not of "work + first forward + last backward": those are the candidate's own packs, so few large
        packs would pass.
        """
        best = self.best()
        return not best.excess_bytes and best.makespan_s <= NEAR_BOUND * self.work_s / self.problem.layout.pp

    def frontier(self, *, may_split: bool, may_reorder: bool) -> list[Trial]:
        """Untried neighbours of the best trial that was not expanded; none when the `BEAM` best all were."""
        pp = self.problem.layout.pp
        for origin in self.ranking()[:BEAM]:
            if origin in self._expanded:
                continue
            self._expanded.add(origin)
            around = neighbours(origin, pp=pp, cuts=self.cuts, may_split=may_split, may_reorder=may_reorder)
            untried = [trial for trial in around if trial not in self.scores]
            if untried:
                return untried
        return []

    def build(self, trial: Trial, *, split: bool = False) -> Candidate | None:
        """The trial as a candidate; None where the token limit rules its packs out.

        Args:
            split: price I and W even where the trial runs backwards whole.
        """
        problem = self.problem
        packs = trial_packs(problem, cut_rules(problem), self.num_tokens, trial.setting, self.ranks)
        if packs is None or (trial.in_core and trial.split and problem.layout.num_stages == 1):
            return None
        forward, backward = packs
        tasks = pipeline_tasks(
            problem.costs,
            forward,
            backward,
            self.num_tokens,
            self.policy,
            split=split or trial.split,
        )
        label = f"{forward.num_packs} forward and {backward.num_packs} backward packs, {trial.describe()}"
        return scheduled_candidate(label, forward, backward, tasks, trial.rule(), problem.cap_bytes, self.policy)


def idle_candidate(problem: StepProblem) -> Candidate:
    """Of a replica without documents."""
    empty = whole_document_columns([], problem.num_tokens[:0])
    tasks = pipeline_tasks(problem.costs, empty, empty, problem.num_tokens[:0])
    return scheduled_candidate("no documents", empty, empty, tasks, LIST, problem.cap_bytes)


def score(wanted: Sequence[tuple[ReplicaSearch, Sequence[Trial]]]) -> int:
    """Rate trials that were not rated yet, all that the core knows in one call; how many were.

    Args:
        wanted: searches of one step, each with documents, and their trials.
    """
    by_costs: dict[int, list[tuple[ReplicaSearch, list[Trial]]]] = {}
    count = 0
    for search, trials in wanted:
        by_setting: dict[Setting, list[Trial]] = {}
        for trial in dict.fromkeys(trials):
            if trial in search.scores:
                continue
            if trial in search.known:
                search.add(trial, search.known[trial])
                continue
            count += 1
            if trial.in_core:
                by_setting.setdefault(trial.setting, []).append(trial)
            else:
                search.add(trial, score_of(search.build(trial)))
        if by_setting:  # one cut, one price for all of a setting
            jobs = by_costs.setdefault(id(search.problem.costs), [])
            jobs.append((search, [trial for same in by_setting.values() for trial in same]))
    for jobs in by_costs.values():
        _score_in_core(jobs)
    return count


def score_of(found: Candidate | None) -> TrialScore | None:
    """What a candidate is worth; None where there is none."""
    if found is None:
        return None
    tasks = found.tasks
    return TrialScore(found.excess_bytes, found.makespan_s, imbalance(tasks.forward_s), imbalance(tasks.backward_s))


def _score_in_core(jobs: list[tuple[ReplicaSearch, list[Trial]]]) -> None:
    """Of searches with the same costs."""
    problem = jobs[0][0].problem
    count = sum(len(trials) for _, trials in jobs)
    rules, empty = cut_rules(problem), np.empty(0, np.int8)
    for search, _ in jobs:
        require_links_of_group(problem.costs, search.ranks, search.policy)
    found = _native.score_trials(
        problem.costs.native,
        [
            (
                search.num_tokens,
                empty if search.policy is None else np.ascontiguousarray(search.policy),
                search.ranks,
                trial_rows(trials),
            )
            for search, trials in jobs
        ],
        *rules.native_curves(),
        np.empty(0, np.int64) if problem.cap_bytes is None else problem.cap_bytes,
        rules.min_slice_tokens,
        NO_TOKEN_LIMIT if rules.max_pack_tokens is None else rules.max_pack_tokens,
        ALIGN_FROM_TILES,
        1 if count < PARALLEL_TRIALS else usable_cores(),
    )
    for (search, trials), columns in zip(jobs, found, strict=True):
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for trial, row in zip(trials, rows, strict=True):
            search.add(trial, None if row[0] < 0 else TrialScore(*row))
