"""`refine`: a step that was found improves by time alone, as `auto` does.

    1  the heaviest replica improves: other schedules and tapered ends of its best packs, then neighbours of its best
       trials; the others rate the best few of those
    2  replicas are evened out again
    3  what is left of the budget goes to the slowest replica, for which the step waits, until none gets better or
       it is near its bound
    4  the packs of the slowest under the other schedules

Everything is counted in trials, never by the clock (unless the options ask), so plans are deterministic.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evenload.plan.search.even_replicas import even_out
from evenload.plan.search.found_step import FoundStep
from evenload.plan.search.probe_rating import best_packs, share_best
from evenload.plan.search.replica_search import ReplicaSearch, by_time, score, score_of
from evenload.plan.search.trial_space import Trial

PROBE_SHARE = 0.5
"""Of the budget: what the first replica may use to find good trials for all."""
SLOWEST_SHARE = 0.5
"""Of what is left: what one search of the slowest replica may use at a time."""
TAPERED = 2
"""Best settings of the improved probe that are tried with smaller packs at both ends."""
REFINED_SHARED = 8
"""Best trials of the improved probe that every replica rates."""
LATE = 1.01
"""Of the median time of replicas: above it one rates more of the improved probe's trials, because memory ruled out, or
its documents do not suit, what suited the probe best."""
LATE_SHARED = 24
"""How many more at most."""
WORTH_IT = 0.999
"""Of the best time: what another schedule must get below to be taken."""


@dataclass(frozen=True)
class RefineRules:
    """How far to improve what was found.

    Args:
        variants: of a trial, the same packs under other schedules.
        tapered: of a trial, others with smaller packs at both ends, for the heaviest replica.
        others: of a trial, the same packs under schedules that are tried at the end, on what was found.
        may_split: backwards may run as I and W.
        may_reorder: other settings of the list schedule may be tried.
        budget: trials over all replicas, those before included; what is due to every replica is always rated.
        time_budget_s: ends the search by the clock too.
    """

    variants: Callable[[Trial], list[Trial]]
    tapered: Callable[[Trial], list[Trial]]
    others: Callable[[Trial], list[Trial]]
    may_split: bool
    may_reorder: bool
    budget: int
    time_budget_s: float | None = None


def refine(found: FoundStep, rules: RefineRules) -> None:
    """Improve a step by time alone, in place; it is never worse after."""
    for search in (*found.own, *found.blocks.values()):
        search.rank_by(by_time)
    busy = [search for search in found.own if len(search.documents)]
    if not busy:
        return
    budget = _Budget(rules)
    probe = max(busy, key=lambda search: search.work_s)
    varied = [probe, *found.blocks.values()]
    score([(search, [v for trial in best_packs(search) for v in rules.variants(trial)]) for search in varied])
    if not probe.is_near_bound():
        score([(probe, [v for trial in best_packs(probe)[:TAPERED] for v in rules.tapered(trial)])])
    _improve(probe, budget, rules, PROBE_SHARE)
    share_best(probe, [search for search in busy if search is not probe], REFINED_SHARED)
    seconds = found.seconds()
    is_late = seconds > LATE * np.median(seconds)
    late = [search for search, slow in zip(found.own, is_late, strict=True) if slow and search in busy]
    share_best(probe, late, LATE_SHARED)
    even_out(found)
    stuck: set[int] = set()
    while budget.left():
        slowest = int(found.seconds().argmax())
        if slowest in stuck:
            break  # the step waits for it, so the others need no search
        shared = [found.blocks[block] for block in found.blocks_of(slowest)]
        own = [found.own[slowest]] if len(found.own[slowest].documents) else []
        if not sum(_improve(search, budget, rules, SLOWEST_SHARE) for search in (*shared, *own)):
            stuck.add(slowest)
    even_out(found)
    _try_others(found, rules)


def _try_others(found: FoundStep, rules: RefineRules) -> None:
    """The packs of the slowest replica under the other schedules, for as long as the step gets faster."""
    worth = (math.inf, math.inf, math.inf)
    while found.worth() < worth:
        worth = found.worth()
        slowest = int(found.seconds().argmax())
        shared = [found.blocks[block] for block in found.blocks_of(slowest)]
        for search in (*shared, found.own[slowest]):
            if len(search.documents) and not search.is_near_bound():
                _try_on_best_packs(search, rules)


def _try_on_best_packs(search: ReplicaSearch, rules: RefineRules) -> None:
    best = search.best()
    for other in [other for trial in best_packs(search) for other in rules.others(trial)]:
        made = score_of(search.build(other))
        # What is the same to rounding stays as it was found.
        if made is not None and (made.excess_bytes, made.makespan_s) < (best.excess_bytes, WORTH_IT * best.makespan_s):
            search.add(other, made)


class _Budget:
    """Trials that are left."""

    def __init__(self, rules: RefineRules) -> None:
        self.trials = rules.budget
        self.deadline_s = None if rules.time_budget_s is None else time.monotonic() + rules.time_budget_s

    def left(self) -> int:
        """Trials that may still be rated."""
        return 0 if self.deadline_s is not None and time.monotonic() > self.deadline_s else self.trials

    def rate(self, search: ReplicaSearch, trials: list[Trial]) -> None:
        """Rate as many as the budget allows."""
        self.trials -= score([(search, trials[: self.left()])])


def _improve(search: ReplicaSearch, budget: _Budget, rules: RefineRules, share: float) -> bool:
    """Rate neighbours of the best trials while the share of the budget lasts; whether the best got better."""
    before, keep = search.worth(search.best()), int((1 - share) * budget.left())
    while budget.left() > keep and not search.is_near_bound():
        around = search.frontier(may_split=rules.may_split, may_reorder=rules.may_reorder)
        if not around:
            break
        budget.rate(search, around)
    return search.worth(search.best()) < before
