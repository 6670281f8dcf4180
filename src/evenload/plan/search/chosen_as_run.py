"""`chosen_as_run`: of trials that a search finds nearly alike, the one that is best as it runs.

A search rates thousands of packings by prices that are linear in what packs hold: packs in one go, or as if all were
halved (`plan.search.halved_search`), shared ones by the mean of their ranks. What runs is priced pack by pack
(`plan.sharing.as_run`) and differs by some percent, which is more than the best trials differ by. So the slowest
replica, for which the step waits, tries the best trial of each of its best settings as it runs, and takes the best;
then the next slowest, until the slowest has tried. What lies beyond memory counts first: on the device, and on the
host, which searches know nothing of. Where a replica shares nothing, its packs are also ordered anew: by the seconds
that they will take, because the order was made for others, and so that host memory holds what they offload
(`plan.search.host_order`).

Price: a candidate (5 to 20 ms with 64 documents) for each of `TRIED` trials of a replica that becomes the slowest;
nothing where the search's price is what runs.
"""

from collections.abc import Callable
from dataclasses import replace

from evenload.cost.tensor_halves import pays
from evenload.plan.problem.candidate import Candidate, in_order
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.found_step import FoundStep, SharedPacks
from evenload.plan.search.host_order import beyond_memory_bytes, ordered_within_host
from evenload.plan.search.replica_search import ReplicaSearch
from evenload.plan.search.trial_space import Setting, Trial
from evenload.plan.sharing.as_run import as_run

TRIED = 16
"""Settings of a replica, the best by the search's price."""

Priced = Callable[[StepProblem, ReplicaChoice], Candidate]
"""A candidate by a problem's own costs."""


def chosen_as_run(problem: StepProblem, found: FoundStep, priced: Priced) -> tuple[ReplicaChoice, ...]:
    """Choices of all replicas, as they run.

    Args:
        problem: with the costs of what runs.
        found: by a search of the same step, maybe under another price.
        priced: what makes its candidates those of `problem`.
    """
    shared = found.shared()

    def tried(replica: int, trial: Trial | None = None) -> ReplicaChoice:
        choice = found.choice(replica, shared, trial)
        by_price = as_run(problem, priced(problem, choice))
        if trial is not None and not found.blocks_of(replica):
            by_price = _ordered_anew(problem, by_price, trial)
        by_price = replace(choice, candidate=by_price)
        return ordered_within_host(problem, by_price) or by_price

    def score(choice: ReplicaChoice) -> tuple[int, float]:
        return beyond_memory_bytes(problem, choice), choice.candidate.makespan_s

    choices = [tried(replica) for replica in range(len(found.own))]
    if not pays(problem.costs):
        return tuple(choices)
    scores = [score(choice) for choice in choices]
    looked_at: set[int] = set()
    while (slowest := max(range(len(choices)), key=scores.__getitem__)) not in looked_at:
        looked_at.add(slowest)
        others = [tried(slowest, trial) for trial in _best_settings(found.own[slowest], shared)]
        choices[slowest] = min([choices[slowest], *others], key=score)
        scores[slowest] = score(choices[slowest])
    return tuple(choices)


def _best_settings(search: ReplicaSearch, shared: SharedPacks) -> list[Trial]:
    """The best trial of each of the best settings; split as the shared packs are priced, where there are any."""
    found: dict[Setting, Trial] = {}
    for trial in search.ranking():
        if not shared.of_block or not trial.split or shared.split:
            found.setdefault(trial.setting, trial)
        if len(found) == TRIED:
            break
    return list(found.values())


def _ordered_anew(problem: StepProblem, found: Candidate, trial: Trial) -> Candidate:
    """The same packs in the order that the trial's schedule gives them by their seconds; itself where that is no
    faster."""
    rule = trial.rule()
    if not rule.reads_times or problem.layout.num_stages == 1:
        return found
    other = in_order(found, rule.actions(found.tasks, problem.cap_bytes), problem.cap_bytes)
    return min(found, other, key=Candidate.score)
