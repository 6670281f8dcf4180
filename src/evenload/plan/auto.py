"""`auto`: one optimiser over all strategies, scored by simulated time within memory (DESIGN §6).

    1  every strategy that plans a step by itself is run; its plan is a candidate as it is, so `auto` is never
       worse than any of them on the same step and layout
    2  documents go to replicas by LPT on forward + backward time; the replica with the most work probes cuts ×
       pack counts under the list schedule, then tries the neighbours of the best, best first (`plan.trial_space`):
       order, look-ahead, split backward, tapered ends, token weight, pack count, cut
    3  the other replicas, which hold nearly equal work, start from the probe's best trials
    4  what is left of the budget goes to the slowest replica, for which the step waits, until none gets better
       or it is within 2 % of its work

Deterministic: the budget is a number of simulations (`max_candidates`). `time_budget_s` ends the search by the
clock instead and is off by default, because the plan then depends on the machine.

The strategies solved by an exact solver are left out: they take seconds, and what they solve (equal windows of
whole documents) is not what bounds a step here.

Price: the strategies' own, and about 0.7 ms a new cut and 0.2 ms a schedule of it at 64 documents and 4 stages.
"""

import time
from collections.abc import Callable, Mapping

from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.plan.dp_balance import assign_replicas
from evenload.plan.pack_counts import pack_counts
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.plan.replica_search import ReplicaSearch, idle_candidate
from evenload.plan.trial_space import Setting, Trial

Planner = Callable[[StepProblem], tuple[ReplicaChoice, ...]]

PROBE_SHARE = 0.5
"""Of the candidates: what the first replica may use to find good trials for all."""
SHARED_TRIALS = 3
"""Of the probe's best trials: what every other replica tries."""


def plan_auto(problem: StepProblem, strategies: Mapping[str, Planner]) -> tuple[ReplicaChoice, ...]:
    """One choice per replica.

    Args:
        strategies: by name, all candidates as they are.

    Raises:
        ConfigError, DataError, InfeasiblePlanError: nothing can plan this step; the error of the last strategy.
    """
    plans: list[tuple[ReplicaChoice, ...]] = []
    failure: Exception | None = None
    for plan in strategies.values():
        try:
            plans.append(plan(problem))
        except (ConfigError, DataError, InfeasiblePlanError) as error:
            # A strategy that does not apply (a document beyond its window) leaves the others.
            failure = error
    searched = _search(problem, plans)
    if searched:
        plans.append(searched)
    if not plans:
        assert failure is not None, "there are strategies, and none planned or failed"
        raise failure
    return min(plans, key=step_score)


def step_score(choices: tuple[ReplicaChoice, ...]) -> tuple[int, float, float]:
    """Smaller is better: memory beyond the limit, then the slowest replica, then all."""
    found = [choice.candidate for choice in choices]
    return (
        max(one.excess_bytes for one in found),
        max(one.makespan_s for one in found),
        sum(one.makespan_s for one in found),
    )


def _search(problem: StepProblem, plans: list[tuple[ReplicaChoice, ...]]) -> tuple[ReplicaChoice, ...] | None:
    options = problem.options
    replicas = assign_replicas(problem.document_s, problem.layout.dp, backend=options.backend)
    searches = [ReplicaSearch(problem, documents) for documents in replicas]
    for search in searches:
        if not len(search.documents):
            search.seed(idle_candidate(problem))
    for choices in plans:
        for choice in choices:
            for search in searches:
                if len(search.documents) == len(choice.documents) and (search.documents == choice.documents).all():
                    search.seed(choice.candidate)
    probe = max(searches, key=lambda search: search.work_s)
    if not len(probe.documents) or not probe.cuts:
        return None
    deadline_s = None if options.time_budget_s is None else time.monotonic() + options.time_budget_s

    def budget(share: float = 1.0) -> int:
        if deadline_s is not None and time.monotonic() > deadline_s:
            return 0
        return max(0, int(share * options.max_candidates) - sum(search.num_simulated for search in searches))

    for trial in _first_trials(probe):
        if budget(PROBE_SHARE):
            probe.try_trial(trial)
    probe.improve(budget(PROBE_SHARE))
    shared = probe.ranking()[:SHARED_TRIALS]
    if not shared:
        return None
    for search in searches:
        for trial in shared:
            # The first one always: a replica without any candidate is no plan.
            if search is not probe and len(search.documents) and (search.best is None or budget()):
                search.try_trial(trial)
    stuck: list[ReplicaSearch] = []
    while budget() and len(stuck) < len(searches):
        slowest = max(searches, key=ReplicaSearch.score)
        if slowest in stuck:
            break  # the step waits for it, so the others need no search
        if not slowest.improve(budget()):
            stuck.append(slowest)
    choices = []
    for search in searches:
        if search.best is None:
            for trial in probe.ranking():
                search.try_trial(trial)
                if search.best is not None:
                    break
        if search.best is None:
            return None
        choices.append(ReplicaChoice(search.documents, search.best))
    return tuple(choices)


def _first_trials(search: ReplicaSearch) -> list[Trial]:
    """Every cut at log-spaced pack counts under one list schedule."""
    problem, options = search.problem, search.problem.options
    tokens = int(search.num_tokens.sum())
    counts = pack_counts(tokens, problem.layout.pp, options.candidates, options.max_pack_tokens)
    split = not options.executable and problem.layout.pp > 1
    return [Trial(Setting(cut, count), split=split) for count in counts for cut in search.cuts]
