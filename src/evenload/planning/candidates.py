"""Make candidate packs and schedules of one replica's documents: a `Trial` is a point of the space that is searched.

    cut               how documents become packs, each by the work of the slowest stage (`types.columns.WorkCurve`):
        asymmetric    SlimPack §4.1: all work lies on one line, documents longest first; a pack ends at the document
                      edge or cut nearest to its target, so that all carry the same work; forward and backward apart
        symmetric     backward packs are the forward packs, slices reversed inside documents; a document of several
                      targets gives packs of one slice each, rests and short documents go longest first into the others
        whole         documents as they are, longest first (LPT)
    num_packs         packs aimed at, before tapering
    token_weight      what a token's linear work counts when cutting: 2 evens out tokens, hence memory
    taper             halvings of the first forward and of the last backward pack: fill and drain of a pipeline cost
                      (P - 1) times these
    order             an `Order` that the core knows, or any other registered schedule, which is rated in Python
    lookahead, split  of the list schedule (`schedule.packflow`); `split` is set, too, where a schedule splits backwards

The core cuts, prices, schedules and simulates many trials of many replicas in one call on several threads
(`native/trials.cpp`), about 60 us a trial of 64 documents, 64 packs and 4 stages; only the chosen trial is made again
as a `Candidate`. `tests/reference/cuts.py` is the same step by step in Python.
"""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.layer_counts import RECOMPUTE
from evenload.cost.pack_pricing import pipeline_tasks, require_links_of_group
from evenload.planning.problem import CHOOSE, Candidate, StepProblem, imbalance
from evenload.schedule.packflow import LIST, LIST_SPLIT, STATIC, packflow_list, packflow_static
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.schedule_rule import UNLIMITED_BYTES, ScheduleRule
from evenload.types.columns import SliceColumns, WorkCurve, whole_document_columns
from evenload.types.tree_columns import NO_TREES, TreeColumns

Cut = Literal["symmetric", "asymmetric", "whole"]
CUTS: tuple[Cut, ...] = ("symmetric", "asymmetric", "whole")
LOOKAHEADS: tuple[int | None, ...] = (None, 3, 0)
TAPERS = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3))
UNLIMITED_LOOKAHEAD = 2**31 - 1
ALIGN_FROM_TILES = 16
"""Cut at whole attention tiles where the shortest slices hold so many: a cut then moves by at most 1/32 of a slice."""
NO_TOKEN_LIMIT = 2**63 - 1
NEAR_BOUND = 1.02  # A replica whose makespan is within this of its work spread over its ranks is not searched further
BEAM = 6  # Best trials whose neighbours are tried
PARALLEL_TRIALS = 8  # Fewer are not worth a second thread


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Order(StrEnum):
    """An order of packs that the core knows, numbered as listed (`native/trials.h`): the memory-capped list schedule,
    backward or forward first after a backward; PackFlow's static order, catching up or injecting forwards."""

    LIST = "list"
    LIST_ALTERNATE = "list alternate"
    STATIC = "static"
    STATIC_INJECT = "static inject"

    @property
    def is_static(self) -> bool:
        return self in (Order.STATIC, Order.STATIC_INJECT)

    @property
    def schedule(self) -> str:
        return STATIC.name if self.is_static else LIST.name


ORDERS: tuple[object, ...] = tuple(Order)


class Setting(NamedTuple):
    """Describe how packs are cut."""

    cut: Cut
    num_packs: int
    token_weight: int = 1
    taper: tuple[int, int] = (0, 0)


class Trial(NamedTuple):
    """Describe packs under one schedule."""

    setting: Setting
    order: Order | ScheduleRule = Order.LIST
    lookahead: int | None = None
    split: bool = False

    def rule(self) -> ScheduleRule:
        if isinstance(self.order, ScheduleRule):
            return self.order
        if self.order.is_static:
            inject = self.order is Order.STATIC_INJECT
            return replace(STATIC, order=lambda tasks, cap_bytes: packflow_static(tasks, inject=inject))
        alternate, lookahead, split = self.order is Order.LIST_ALTERNATE, self.lookahead, self.split
        return replace(
            LIST_SPLIT if split else LIST,
            order=lambda tasks, cap_bytes: packflow_list(
                tasks, cap_bytes=cap_bytes, alternate=alternate, lookahead=lookahead, split=split
            ),
        )

    def describe(self) -> str:
        cut, _, token_weight, taper = self.setting
        parts = (
            (True, "whole documents" if cut == "whole" else f"{cut} cuts"),
            (token_weight != 1, f"token weight {token_weight}"),
            (taper != (0, 0), f"taper {taper[0]}+{taper[1]}"),
            (isinstance(self.order, Order), f"{self.order}"),
            (self.lookahead is not None, f"look-ahead {self.lookahead}"),
            (self.split, "I and W"),
        )
        return ", ".join(part for is_shown, part in parts if is_shown)


def orders_of(schedule: str) -> tuple[Order | ScheduleRule, ...]:
    """Return the orders of trials that run a schedule; all that the core knows where it may be chosen."""
    if schedule == CHOOSE:
        return tuple(Order)
    return tuple(order for order in Order if order.schedule == schedule) or (SCHEDULES.named(schedule),)


def trial_under(setting: Setting, order: Order | ScheduleRule) -> Trial:
    return Trial(setting, order, split=isinstance(order, ScheduleRule) and order.splits_backward)


def trial_rows(trials: Sequence[Trial]) -> NDArray[np.int64]:
    """Encode trials for the core: cut, count, token weight, tapers, order, look-ahead, split; int64[trials, 8]."""
    rows = [
        (
            CUTS.index(trial.setting.cut),
            trial.setting.num_packs,
            trial.setting.token_weight,
            *trial.setting.taper,
            ORDERS.index(trial.order),
            UNLIMITED_LOOKAHEAD if trial.lookahead is None else trial.lookahead,
            int(trial.split),
        )
        for trial in trials
    ]
    return np.array(rows, np.int64).reshape(-1, 8)


def neighbours(
    trial: Trial, *, pp: int, cuts: tuple[Cut, ...], may_split: bool, may_reorder: bool = True
) -> Iterator[Trial]:
    """Yield the trials that differ in one coordinate; the cheap ones, which keep the packs, first."""
    setting = trial.setting
    if pp > 1 and may_reorder:
        yield trial._replace(order=Order.LIST_ALTERNATE if trial.order is Order.LIST else Order.LIST)
        for lookahead in LOOKAHEADS:
            if lookahead != trial.lookahead:
                yield trial._replace(lookahead=lookahead)
        if may_split:
            yield trial._replace(split=not trial.split)
    if pp > 1:
        at = TAPERS.index(setting.taper)
        for taper in TAPERS[max(0, at - 1) : at + 2]:
            if taper != setting.taper:
                yield trial._replace(setting=setting._replace(taper=taper))
    yield trial._replace(setting=setting._replace(token_weight=3 - setting.token_weight))
    counts = (setting.num_packs * 3 // 2, setting.num_packs * 3 // 4, setting.num_packs + pp)
    for count in dict.fromkeys(max(1, count) for count in counts):
        if count != setting.num_packs:
            yield trial._replace(setting=setting._replace(num_packs=count))
    for cut in cuts:
        if cut != setting.cut:
            yield trial._replace(setting=setting._replace(cut=cut))


@dataclass(frozen=True)
class CutRules:
    """Hold what all cuts of a step have in common: work on the slowest stage, limits, and the rows at whose multiples
    cuts cost least (`tile`)."""

    forward: WorkCurve
    backward: WorkCurve
    tile: int
    min_slice_tokens: int
    max_pack_tokens: int | None

    def native_curves(self) -> tuple[tuple, tuple]:
        curves = self.forward, self.backward
        forward, backward = ((one.linear_s, one.attention_s, one.slice_s) for one in curves)
        return forward, backward

    def native_limits(self) -> tuple[int, int, int]:
        limit = NO_TOKEN_LIMIT if self.max_pack_tokens is None else self.max_pack_tokens
        return self.min_slice_tokens, limit, ALIGN_FROM_TILES


def cut_rules(problem: StepProblem) -> CutRules:
    """Return the rules of a step; backward is balanced as if all tokens were recomputed alike."""
    share = 0.0
    if problem.policy is not None and len(problem.num_tokens):
        share = float(problem.num_tokens[problem.policy == RECOMPUTE].sum() / problem.num_tokens.sum())
    return CutRules(
        problem.costs.work_curve("forward"),
        problem.costs.work_curve("backward", recomputed_share=share),
        problem.costs.cut_multiple,
        problem.options.min_slice_tokens,
        problem.options.max_pack_tokens,
    )


def trial_packs(
    problem: StepProblem,
    rules: CutRules,
    num_tokens: NDArray[np.int64],
    setting: Setting,
    ranks: int,
    trees: TreeColumns = NO_TREES,
) -> tuple[SliceColumns, SliceColumns] | None:
    """Cut at least one document (`trees`: their ranges) into forward and backward packs, every slice shared by
    `ranks`; None where the token limit rules the setting out."""
    row, native = trial_rows([Trial(setting)])[0], problem.costs.native
    cuts = _native.cut_packs(native, num_tokens, trees.arrays(), row, *rules.native_curves(), *rules.native_limits())
    if cuts is None:
        return None
    forward, backward = (
        SliceColumns(*cut, pad_to=np.zeros(len(cut[-1]) - 1, np.int64), cp=np.full(len(cut[0]), ranks, np.int64))
        for cut in cuts
    )
    return forward, backward


class TrialScore(NamedTuple):
    """Hold bytes above the memory limit on the worst rank, seconds, and max/mean pack time on the slowest stage,
    forward and backward; smaller is better."""

    excess_bytes: int
    makespan_s: float
    imbalance_forward: float
    imbalance_backward: float


NO_SCORE = TrialScore(UNLIMITED_BYTES, float("inf"), float("inf"), float("inf"))


def by_time(score: TrialScore) -> tuple[int, float]:
    return score.excess_bytes, score.makespan_s


class ReplicaSearch:
    """Rate trials of some documents (int64[k], indices into the problem's arrays), whose slices `ranks` share (default:
    the layout's cp), and rank them by `score_key`, smaller is better.

    Searches of one problem share scores: `slimpack` and `auto` rate nearly the same trials, and a step that exceeds
    host memory is searched again under policies that were rated before."""

    def __init__(
        self,
        problem: StepProblem,
        documents: NDArray[np.int64],
        ranks: int | None = None,
        score_key: Callable[[TrialScore], tuple[int, float]] = by_time,
    ) -> None:
        self.problem, self.documents, self.score_key = problem, documents, score_key
        self.ranks = problem.layout.cp if ranks is None else ranks
        key = (self.ranks, documents.tobytes())
        self.known: dict[Trial, TrialScore | None] = problem.known_scores.setdefault(key, {})
        self.num_tokens = np.ascontiguousarray(problem.num_tokens[documents])
        self.trees = problem.trees.taken(documents)
        self.policy = problem.policy_of(documents)
        self.scores: dict[Trial, TrialScore | None] = {}
        self._expanded: set[Trial] = set()
        self._ranking: list[Trial] | None = None

    def over(self, documents: NDArray[np.int64]) -> "ReplicaSearch":
        return ReplicaSearch(self.problem, documents, self.ranks, self.score_key)

    @functools.cached_property
    def work_s(self) -> float:
        """Return the forward + backward seconds through the whole pipeline, of one of the ranks that share it."""
        problem = self.problem
        if self.ranks == problem.layout.cp:
            return float(problem.document_s[self.documents].sum())
        return float(problem.costs.document_seconds(self.num_tokens, self.policy, self.ranks, self.trees).sum())

    @functools.cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """List the cuts that the model and the token limit allow, the most promising first."""
        limit = self.problem.options.max_pack_tokens
        whole = limit is None or not len(self.num_tokens) or int(self.num_tokens.max()) <= limit
        sliced: tuple[Cut, ...] = ("symmetric", "asymmetric") if self.problem.costs.model.may_cut_documents else ()
        return (*sliced, "whole") if whole else sliced

    def add(self, trial: Trial, result: TrialScore | None) -> None:
        self.scores[trial] = self.known[trial] = result
        self._ranking = None

    def rank_by(self, score_key: Callable[[TrialScore], tuple[int, float]]) -> None:
        self.score_key, self._ranking = score_key, None

    def ranking(self) -> list[Trial]:
        if self._ranking is None:
            score_key = {trial: self.score_key(score) for trial, score in self.scores.items() if score is not None}
            self._ranking = sorted(score_key, key=score_key.__getitem__)
        return self._ranking

    def best(self) -> TrialScore:
        """Return the score of the best trial; infinite before there is one, 0 without documents."""
        if not len(self.documents):
            return TrialScore(0, 0.0, 1.0, 1.0)
        ranking = self.ranking()
        return (self.scores[ranking[0]] or NO_SCORE) if ranking else NO_SCORE

    def is_near_bound(self) -> bool:
        """Check whether the best trial fits memory and is within `NEAR_BOUND` of the work on every rank. First forward
        and last backward do not count: few large packs would pass."""
        best = self.best()
        return not best.excess_bytes and best.makespan_s <= NEAR_BOUND * self.work_s / self.problem.layout.pp

    def frontier(self, *, may_split: bool, may_reorder: bool) -> list[Trial]:
        """Return untried neighbours of the best trial that was not expanded; none when the `BEAM` best all were."""
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
        """Make the candidate of a trial; None where the token limit rules its packs out. `split`: price I and W too."""
        problem = self.problem
        columns = trial_packs(problem, cut_rules(problem), self.num_tokens, trial.setting, self.ranks, self.trees)
        if columns is None or (isinstance(trial.order, Order) and trial.split and problem.layout.num_stages == 1):
            return None
        packs = problem.packs_of(self.documents, *columns)
        tasks = pipeline_tasks(problem.costs, packs, split=split or trial.split)
        counts = f"{packs.forward.num_packs} forward and {packs.backward.num_packs} backward packs"
        return problem.scheduled(f"{counts}, {trial.describe()}", packs, trial.rule(), tasks)

    def build_best(self, *, split: bool) -> Candidate:
        candidate = self.build(self.ranking()[0], split=split)
        assert candidate is not None, "only possible trials are ranked"
        return candidate


def idle_candidate(problem: StepProblem) -> Candidate:
    nothing = whole_document_columns([], problem.num_tokens[:0])
    return problem.scheduled("no documents", problem.packs_of(np.empty(0, np.int64), nothing), LIST)


def score(wanted: Sequence[tuple[ReplicaSearch, Sequence[Trial]]]) -> int:
    """Rate trials that were not rated yet, all that the core knows in one call, and return how many these were."""
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
            search.problem.effort.add(1, len(search.documents))
            if isinstance(trial.order, Order):
                by_setting.setdefault(trial.setting, []).append(trial)
            else:
                search.add(trial, score_of(search.build(trial)))
        if by_setting:  # one cut, one price for all of a setting
            jobs = by_costs.setdefault(id(search.problem.costs), [])
            jobs.append((search, [trial for same in by_setting.values() for trial in same]))
    for jobs in by_costs.values():
        _score_in_core(jobs)
    return count


def score_of(result: Candidate | None) -> TrialScore | None:
    if result is None:
        return None
    tasks = result.tasks
    return TrialScore(result.excess_bytes, result.makespan_s, imbalance(tasks.forward_s), imbalance(tasks.backward_s))


def _score_in_core(jobs: list[tuple[ReplicaSearch, list[Trial]]]) -> None:
    problem = jobs[0][0].problem
    rules, empty = cut_rules(problem), np.empty(0, np.int8)
    for search, _ in jobs:
        require_links_of_group(problem.costs, search.ranks, search.policy)
    result = _native.score_trials(
        problem.costs.native,
        [
            (
                search.num_tokens,
                search.trees.arrays(),
                empty if search.policy is None else search.policy,
                search.ranks,
                trial_rows(trials),
            )
            for search, trials in jobs
        ],
        *rules.native_curves(),
        np.empty(0, np.int64) if problem.cap_bytes is None else problem.cap_bytes,
        *rules.native_limits(),
        1 if sum(len(trials) for _, trials in jobs) < PARALLEL_TRIALS else usable_cores(),
    )
    for (search, trials), columns in zip(jobs, result, strict=True):
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for trial, row in zip(trials, rows, strict=True):
            search.add(trial, None if row[0] < 0 else TrialScore(*row))
