"""Search over all replicas of a step: what `slimpack` and `auto` share.

    1  the heaviest replica, and the one with the longest document, rate the first trials, then other schedules of the
       best packs
    2  every other replica, which holds nearly equal work, rates the best few of those
    3  replicas are evened out: short documents move from the slowest to the fastest, by simulated time

Documents that groups of replicas share (DP-Merge) come before, each block's in its own search; replicas then start
from different times, which step 3 takes into account. `refine` (`auto` only) goes on from there:

    4  the heaviest replica improves: neighbours of its best trials; the others rate the best few of those
    5  replicas are evened out again
    6  what is left of the budget goes to the slowest replica, for which the step waits, until none gets better or
       it is near its bound

Everything is counted in trials, never by the clock (unless the options ask), so plans are deterministic.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.plan.packing.dp_merge import Merge, in_phases
from evenload.plan.problem.candidate import Candidate
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.replica_search import (
    KnownScores,
    ReplicaSearch,
    TrialScore,
    by_time,
    idle_candidate,
    score,
    score_of,
)
from evenload.plan.search.trial_space import Setting, Trial
from evenload.types.replica_block import ReplicaBlock

PROBE_SHARE = 0.5
"""Of the budget: what the first replica may use to find good trials for all."""
SLOWEST_SHARE = 0.5
"""Of what is left: what one search of the slowest replica may use at a time."""
EVEN_REPLICAS = 1.003
"""Max/mean time of replicas at which no more documents move."""
MOST_MOVES = 2
"""Documents moved, for each replica."""
MOVED_SHARES = (0.5, 0.25, 0.1)
"""Of the gap between the slowest and the fastest replica: documents that are tried, until one helps."""
MOVED_TRIALS = 3
"""Best trials of a replica that are rated again when its documents change."""
VARIED = 4
"""Best settings of a probe whose packs are tried under other schedules."""
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
MORE_PACKS = 12
"""Doublings of the pack count where no cut meets the token limit."""


@dataclass(frozen=True)
class SearchRules:
    """How far to search.

    Args:
        first: trials that probes rate, given a replica.
        variants: of a trial, the same packs under other schedules.
        spare: trials for a replica that nothing else fits into memory.
        worth: ranks trials.
        shared: best trials of the probe that every replica rates.
        known: scores that searches of the same problem share.
        even_out: documents move from the slowest replica to the fastest.
    """

    first: Callable[[ReplicaSearch], list[Trial]]
    variants: Callable[[Trial], list[Trial]]
    spare: Callable[[ReplicaSearch], list[Trial]] = lambda search: []
    worth: Callable[[TrialScore], tuple[int, float]] = by_time
    shared: int = 3
    known: KnownScores | None = None
    even_out: bool = True


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


@dataclass(frozen=True, eq=False)
class FoundStep:
    """Searches with a best trial each, not yet made into candidates.

    Args:
        own: per replica what it runs alone.
        blocks: what groups of replicas share, before that; larger blocks first.
    """

    own: list[ReplicaSearch]
    blocks: dict[ReplicaBlock, ReplicaSearch]

    def blocks_of(self, replica: int) -> list[ReplicaBlock]:
        """Blocks with this replica, largest first."""
        return [block for block in self.blocks if replica in block.replicas]

    def start_s(self, replica: int) -> float:
        """When a replica's own documents begin: after those it shares."""
        return _start_s(self.blocks, replica)

    def seconds(self) -> NDArray[np.float64]:
        """Simulated time of every replica; float64[dp]."""
        return np.array([self.start_s(i) + search.best().makespan_s for i, search in enumerate(self.own)])

    def worth(self) -> tuple[int, float, float]:
        """Smaller is better: memory beyond the limit, then the slowest replica, then all."""
        excess = max(search.best().excess_bytes for search in (*self.own, *self.blocks.values()))
        seconds = self.seconds()
        return excess, float(seconds.max()), float(seconds.sum())

    def choices(self) -> tuple[ReplicaChoice, ...]:
        """Candidates of the best trials."""
        # Phases are joined column by column, so all are priced with I and W where any runs them.
        used = [search for search in (*self.own, *self.blocks.values()) if len(search.documents)]
        split = bool(self.blocks) and any(search.ranking()[0].split for search in used)
        shared = {block: _built(search, split) for block, search in self.blocks.items()}
        choices = []
        for replica, search in enumerate(self.own):
            mine = self.blocks_of(replica)
            parts = [(shared[block], self.blocks[block].documents) for block in mine]
            if len(search.documents):
                parts.append((_built(search, split), search.documents))
            if not parts:
                parts.append((idle_candidate(search.problem), search.documents))
            if len(parts) == 1:
                choices.append(ReplicaChoice(parts[0][1], parts[0][0]))
                continue
            candidates, documents = [part[0] for part in parts], [part[1] for part in parts]
            choices.append(ReplicaChoice(np.concatenate(documents), in_phases(search.problem, candidates, documents)))
        return tuple(choices)


def search_step(problem: StepProblem, replicas: Sequence[NDArray[np.int64]], rules: SearchRules) -> FoundStep | None:
    """The best found for documents assigned to replicas; None where no trial of theirs is possible."""
    return _search(problem, list(replicas), {}, rules)


def search_merged(problem: StepProblem, merge: Merge, rules: SearchRules, pipeline_share: float) -> FoundStep | None:
    """As `search_step`, where blocks of replicas share some documents.

    Args:
        pipeline_share: of a pipeline's time that computes, from an earlier search: a replica's own documents are
            assigned by the time that the shared ones leave it.
    """
    blocks = {
        block: ReplicaSearch(
            problem.of_block(block), documents, block.size * problem.layout.cp, rules.worth, rules.known
        )
        for block, documents in merge.blocks.items()
    }
    if not _rate_blocks(blocks, rules):
        return None
    load_s = np.array([_start_s(blocks, replica) for replica in range(problem.layout.dp)]) * problem.layout.pp
    own = merge.deal_own(problem.document_s / pipeline_share, load_s, problem.paces)
    return _search(problem, own, blocks, rules)


def _rate_blocks(blocks: dict[ReplicaBlock, ReplicaSearch], rules: SearchRules) -> bool:
    """Of blocks of one size the one with most work rates the first trials and the others the best of those, as replicas
    do; whether all have a trial."""
    for size in dict.fromkeys(block.size for block in blocks):
        alike = [search for block, search in blocks.items() if block.size == size]
        probe = max(alike, key=lambda search: search.work_s)
        _rate_first([probe], rules)
        if not _has_trial(probe) and not _rate_more_packs(probe, rules):
            return False
        others = [search for search in alike if search is not probe]
        _share(probe, others, rules.shared)
        lacking = [search for search in others if _lacks(search, probe)]
        _rate_first(lacking, rules)
        if not all(_has_trial(search) or _rate_more_packs(search, rules) for search in lacking):
            return False
    return True


def _search(
    problem: StepProblem,
    replicas: list[NDArray[np.int64]],
    blocks: dict[ReplicaBlock, ReplicaSearch],
    rules: SearchRules,
) -> FoundStep | None:
    searches = [
        ReplicaSearch(problem.of_replica(replica), documents, worth=rules.worth, known=rules.known)
        for replica, documents in enumerate(replicas)
    ]
    found = FoundStep(searches, blocks)
    busy = [search for search in searches if len(search.documents)]
    if not busy:
        return found
    probe = max(busy, key=lambda search: search.work_s)
    longest = max(busy, key=lambda search: int(search.num_tokens.max()))
    _rate_first(list(dict.fromkeys((probe, longest))), rules)
    if not _has_trial(probe) and not _rate_more_packs(probe, rules):
        return None
    others = [search for search in busy if search is not probe]
    _share(probe, others, rules.shared)
    # Where the probe's trials do not fit, or cannot cut these documents, everything is tried.
    lacking = [search for search in others if _lacks(search, probe)]
    _rate_first(lacking, rules)
    if not all(_has_trial(search) or _rate_more_packs(search, rules) for search in lacking):
        return None
    if rules.even_out:
        _even_out(found)
    # Last, because a replica that fits by a slow trial would give its documents away.
    if over := [search for search in found.own if search.best().excess_bytes]:
        score([(search, rules.spare(search)) for search in over])
        if rules.even_out:
            _even_out(found)
    return found


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
    score([(search, [v for trial in _best_packs(search) for v in rules.variants(trial)]) for search in varied])
    if not probe.is_near_bound():
        score([(probe, [v for trial in _best_packs(probe)[:TAPERED] for v in rules.tapered(trial)])])
    _improve(probe, budget, rules, PROBE_SHARE)
    _share(probe, [search for search in busy if search is not probe], REFINED_SHARED)
    seconds = found.seconds()
    late = seconds > LATE * np.median(seconds)
    _share(probe, [one for one, is_late in zip(found.own, late, strict=True) if is_late and one in busy], LATE_SHARED)
    _even_out(found)
    stuck: set[int] = set()
    while budget.left():
        slowest = int(found.seconds().argmax())
        if slowest in stuck:
            break  # the step waits for it, so the others need no search
        shared = [found.blocks[block] for block in found.blocks_of(slowest)]
        own = [found.own[slowest]] if len(found.own[slowest].documents) else []
        if not sum(_improve(search, budget, rules, SLOWEST_SHARE) for search in (*shared, *own)):
            stuck.add(slowest)
    _even_out(found)
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
    for other in [other for trial in _best_packs(search) for other in rules.others(trial)]:
        made = score_of(search.build(other))
        # What is the same to rounding stays as it was found.
        if made is not None and (made.excess_bytes, made.makespan_s) < (best.excess_bytes, WORTH_IT * best.makespan_s):
            search.add(other, made)


def _rate_first(searches: list[ReplicaSearch], rules: SearchRules) -> None:
    """Every first trial, then other schedules of the best packs."""
    score([(search, rules.first(search)) for search in searches])
    score([(search, [v for trial in _best_packs(search) for v in rules.variants(trial)]) for search in searches])


def _best_packs(search: ReplicaSearch) -> list[Trial]:
    """The best trial of each of the best settings."""
    found: dict[Setting, Trial] = {}
    for trial in search.ranking():
        found.setdefault(trial.setting, trial)
        if len(found) == VARIED:
            break
    return list(found.values())


def _share(probe: ReplicaSearch, others: list[ReplicaSearch], count: int) -> None:
    trials = probe.ranking()[:count]
    score([(search, trials) for search in others])


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


def _even_out(found: FoundStep) -> None:
    """Move documents from the slowest replica to the fastest while that makes the slower of both faster."""
    for _ in range(MOST_MOVES * len(found.own)):
        seconds = found.seconds()
        slow, fast = int(seconds.argmax()), int(seconds.argmin())
        if seconds[slow] <= EVEN_REPLICAS * seconds.mean() or len(found.own[slow].documents) < 2:
            return
        # A document that fills half the gap; where memory makes that one too expensive, smaller ones.
        if not any(_move(found, slow, fast, (seconds[slow] - seconds[fast]) * share) for share in MOVED_SHARES):
            return


def _move(found: FoundStep, slow: int, fast: int, wanted_s: float) -> bool:
    """Move one document of about so many seconds, unless the slower of both replicas does not gain."""
    one, other = found.own[slow], found.own[fast]
    problem = one.problem
    busy_share = one.work_s / (problem.layout.pp * one.best().makespan_s)
    moved = int(np.abs(problem.document_s[one.documents] - wanted_s * problem.layout.pp * busy_share).argmin())
    trials = one.ranking()[:MOVED_TRIALS]
    lighter = ReplicaSearch(problem, np.delete(one.documents, moved), worth=one.worth, known=one.pool)
    joined = np.sort(np.append(other.documents, one.documents[moved]))
    heavier = ReplicaSearch(other.problem, joined, worth=one.worth, known=one.pool)
    score([(lighter, trials), (heavier, [*other.ranking()[:MOVED_TRIALS], *trials])])
    if not (_has_trial(lighter) and _has_trial(heavier)):
        return False
    starts_s = found.start_s(slow), found.start_s(fast)
    if _slower(starts_s, (lighter, heavier)) >= _slower(starts_s, (one, other)):
        return False
    found.own[slow], found.own[fast] = lighter, heavier
    return True


def _slower(starts_s: tuple[float, float], searches: tuple[ReplicaSearch, ReplicaSearch]) -> tuple[int, float]:
    """What two replicas are worth together: the worse of both."""
    worth = [search.worth(search.best()) for search in searches]
    return (
        max(excess for excess, _ in worth),
        max(start_s + seconds for start_s, (_, seconds) in zip(starts_s, worth, strict=True)),
    )


def _lacks(search: ReplicaSearch, probe: ReplicaSearch) -> bool:
    """No trial, or none that fits memory or is good otherwise (`worth`) although the probe's are."""
    if not _has_trial(search):
        return True
    here, there = search.best(), probe.best()
    if here.excess_bytes:
        return not there.excess_bytes
    return search.worth(here)[1] > here.makespan_s and probe.worth(there)[1] <= there.makespan_s


def _has_trial(search: ReplicaSearch) -> bool:
    return any(found is not None for found in search.scores.values())


def _rate_more_packs(search: ReplicaSearch, rules: SearchRules) -> bool:
    """Symmetric cuts cannot always meet a token limit: a rest may be too long. More packs make every rest shorter."""
    trials = rules.first(search)
    for _ in range(MORE_PACKS):
        trials = [trial.with_count(2 * trial.setting.num_packs) for trial in trials]
        score([(search, trials)])
        if _has_trial(search):
            return True
    return False


def _start_s(blocks: dict[ReplicaBlock, ReplicaSearch], replica: int) -> float:
    return sum(search.best().makespan_s for block, search in blocks.items() if replica in block.replicas)


def _built(search: ReplicaSearch, split: bool) -> Candidate:
    found = search.build(search.ranking()[0], split=split)
    assert found is not None, "only possible trials are ranked"
    return found
