"""How searches that hold nearly equal work share what one of them found: the probe rates the first trials, the others
the best few of those."""

from collections.abc import Callable
from dataclasses import dataclass

from evenload.plan.search.replica_search import KnownScores, ReplicaSearch, TrialScore, by_time, score
from evenload.plan.search.trial_space import Setting, Trial

VARIED = 4
"""Best settings of a probe whose packs are tried under other schedules."""
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


def rate_by_probe(
    probe: ReplicaSearch, others: list[ReplicaSearch], first: list[ReplicaSearch], rules: SearchRules
) -> bool:
    """The probe rates the first trials and the others the best of those; whether all have a trial.

    Args:
        others: without the probe.
        first: rate every first trial whatever the probe finds; the probe among them.
    """
    rate_first(first, rules)
    if not has_trial(probe) and not _rate_more_packs(probe, rules):
        return False
    share_best(probe, others, rules.shared)
    # Where the probe's trials do not fit, or cannot cut these documents, everything is tried.
    lacking = [search for search in others if _lacks(search, probe)]
    rate_first(lacking, rules)
    return all(has_trial(search) or _rate_more_packs(search, rules) for search in lacking)


def rate_first(searches: list[ReplicaSearch], rules: SearchRules) -> None:
    """Every first trial, then other schedules of the best packs."""
    score([(search, rules.first(search)) for search in searches])
    score([(search, [v for trial in best_packs(search) for v in rules.variants(trial)]) for search in searches])


def best_packs(search: ReplicaSearch) -> list[Trial]:
    """The best trial of each of the best settings."""
    found: dict[Setting, Trial] = {}
    for trial in search.ranking():
        found.setdefault(trial.setting, trial)
        if len(found) == VARIED:
            break
    return list(found.values())


def share_best(probe: ReplicaSearch, others: list[ReplicaSearch], count: int) -> None:
    """The others rate the probe's best trials."""
    trials = probe.ranking()[:count]
    score([(search, trials) for search in others])


def _lacks(search: ReplicaSearch, probe: ReplicaSearch) -> bool:
    """No trial, or none that fits memory or is good otherwise (`worth`) although the probe's are."""
    if not has_trial(search):
        return True
    here, there = search.best(), probe.best()
    if here.excess_bytes:
        return not there.excess_bytes
    return search.worth(here)[1] > here.makespan_s and probe.worth(there)[1] <= there.makespan_s


def has_trial(search: ReplicaSearch) -> bool:
    """Some trial of it is possible."""
    return any(found is not None for found in search.scores.values())


def _rate_more_packs(search: ReplicaSearch, rules: SearchRules) -> bool:
    """Symmetric cuts cannot always meet a token limit: a rest may be too long. More packs make every rest shorter."""
    trials = rules.first(search)
    for _ in range(MORE_PACKS):
        trials = [trial.with_count(2 * trial.setting.num_packs) for trial in trials]
        score([(search, trials)])
        if has_trial(search):
            return True
    return False
