"""`auto`: one optimiser over all strategies, scored by simulated time within memory (DESIGN §6).

    1  its own search (`plan.step_search`): cuts × pack counts under the list schedule, whole and split backwards, then
       neighbours of the best (`plan.trial_space`): order, look-ahead, tapered ends, token weight, pack count, cut;
       with and without documents that replicas share
    2  every strategy that plans a step by itself, unless it cannot win: its plan is a candidate as it is, so `auto` is
       never worse than any of them on the same step and layout

A strategy of whole documents cannot win where the longest document alone, through all stages and back, takes longer
than what was found.

Deterministic: the budget is a number of simulations (`max_candidates`). `time_budget_s` ends the search by the
clock instead and is off by default, because the plan then depends on the machine.

The strategies solved by an exact solver are left out: they take seconds, and what they solve (equal windows of
whole documents) is not what bounds a step here.
"""

from collections.abc import Collection, Mapping

from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.plan.pack_counts import pack_counts
from evenload.plan.problem import Planner, ReplicaChoice, StepProblem
from evenload.plan.replica_search import ReplicaSearch
from evenload.plan.slimpack import search_with_merging
from evenload.plan.step_search import FoundStep, SearchRules
from evenload.plan.trial_space import Setting, Trial


def plan_auto(
    problem: StepProblem, strategies: Mapping[str, Planner], whole: Collection[str] = ()
) -> tuple[ReplicaChoice, ...]:
    """One choice per replica.

    Args:
        strategies: by name, all candidates as they are.
        whole: those that never cut a document nor share one among replicas.

    Raises:
        ConfigError, DataError, InfeasiblePlanError: nothing can plan this step; the error of the last strategy.
    """
    plans: list[tuple[ReplicaChoice, ...]] = []
    searched = search_own(problem)
    if searched:
        plans.append(searched.choices())
    longest_s = _longest_path_s(problem)
    failure: Exception | None = None
    for name, plan in strategies.items():
        if plans and name in whole and not step_score(plans[0])[0] and step_score(plans[0])[1] <= longest_s:
            continue
        try:
            plans.append(plan(problem))
        except (ConfigError, DataError, InfeasiblePlanError) as error:
            # A strategy that does not apply (a document beyond its window) leaves the others.
            failure = error
    if not plans:
        assert failure is not None, "there are strategies, and none planned or failed"
        raise failure
    return min(plans, key=step_score)


def search_own(problem: StepProblem) -> FoundStep | None:
    """The search alone; None where no cut meets the token limit."""
    options = problem.options
    rules = SearchRules(
        first=_first_trials,
        budget=options.max_candidates,
        may_split=_may_split(problem),
        time_budget_s=options.time_budget_s,
    )
    return search_with_merging(problem, rules, always=True)


def step_score(choices: tuple[ReplicaChoice, ...]) -> tuple[int, float, float]:
    """Smaller is better: memory beyond the limit, then the slowest replica, then all."""
    found = [choice.candidate for choice in choices]
    return (
        max(one.excess_bytes for one in found),
        max(one.makespan_s for one in found),
        sum(one.makespan_s for one in found),
    )


def _longest_path_s(problem: StepProblem) -> float:
    """No plan of whole documents is faster: the longest one's forward and backward pass every stage in turn."""
    return float(problem.document_s.max(initial=0.0))


def _may_split(problem: StepProblem) -> bool:
    return not problem.options.executable and problem.layout.num_stages > 1


def _first_trials(search: ReplicaSearch) -> list[Trial]:
    """Every cut at log-spaced pack counts under one list schedule."""
    problem, options = search.problem, search.problem.options
    tokens = int(search.num_tokens.sum())
    counts = pack_counts(tokens, problem.layout.pp, options.candidates, options.max_pack_tokens)
    splits = (False, True) if _may_split(problem) else (False,)
    return [Trial(Setting(cut, count), split=split) for count in counts for cut in search.cuts for split in splits]
