"""`auto`: one optimiser over all strategies, scored by simulated time within memory (DESIGN §6).

    1  `slimpack`'s search by time alone, even cuts or not, with and without documents that replicas share
    2  where several activation policies come close, each of the best (`plan.step_search.refine`): split backwards and
       other schedules of the best packs, then neighbours of the best trials (`plan.trial_space`): look-ahead, tapered
       ends, token weight, pack count, cut; the slowest replica last
    3  every other strategy that plans a step by itself, unless it cannot win: its plan is a candidate as it is

So `auto` is never worse than any of them on the same step and layout. A strategy of whole documents cannot win where
the longest document alone, through all stages and back, takes longer than what was found.

Deterministic: the budget is a number of simulations (`max_candidates`). `time_budget_s` ends the search by the
clock instead and is off by default, because the plan then depends on the machine.

The strategies solved by an exact solver are left out: they take seconds, and what they solve (equal windows of
whole documents) is not what bounds a step here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.plan.levels import plan_by_levels
from evenload.plan.pack_counts import pack_counts
from evenload.plan.problem import Planner, ReplicaChoice, StepProblem
from evenload.plan.replica_search import KnownScores, ReplicaSearch, by_time
from evenload.plan.slimpack import plan_slimpack, search_levels, slimpack_rules
from evenload.plan.step_search import FoundStep, RefineRules, SearchRules, refine
from evenload.plan.trial_space import Setting, Trial

CLOSE_LEVELS = 1.06
"""Refining gains so much, so levels within it of the best are refined too."""
MOST_REFINED = 3
"""Levels that are refined, at most."""

Planned = tuple[StepProblem, tuple[ReplicaChoice, ...]]


@dataclass(frozen=True)
class Rival:
    """A strategy that `auto` must not be worse than.

    Args:
        cuts: it may cut a document or share one among replicas.
        bounded: without a memory limit it is never slower than with one.
        can_fit: as in `plan.levels.plan_by_levels`.
    """

    plan: Planner
    cuts: bool
    bounded: bool = False
    can_fit: Callable[[StepProblem], bool] | None = None


def plan_auto(problems: Sequence[StepProblem], rivals: Sequence[Rival]) -> Planned:
    """The step under the policies that suit it best, and one choice per replica.

    Args:
        problems: the step under every level of `plan.policies` that may be used, all stored first.
        rivals: all candidates as they are.

    Raises:
        ConfigError, DataError, InfeasiblePlanError: nothing can plan this step; the error of the last strategy.
    """
    plans: list[Planned] = []
    # By problem, because its policies are part of every score; `slimpack` rates nearly the same trials.
    known: dict[int, KnownScores] = {id(problem): {} for problem in problems}
    steps = _close_to_best(
        search_levels(problems, lambda problem: replace(rules_of(problem), known=known.get(id(problem))))
    )
    for problem, found in steps:
        refine(found, refine_rules(problem))
    if steps:
        problem, found = min(steps, key=lambda step: step[1].worth())
        plans.append((problem, found.choices()))
    failure: Exception | None = None
    try:
        plans.append(plan_slimpack(problems, lambda problem: known.get(id(problem))))
    except (ConfigError, InfeasiblePlanError) as error:
        failure = error
    for rival in rivals:
        try:
            if plans and not _may_win(rival, problems, plans[0][1]):
                continue
            plans.append(plan_by_levels(problems, rival.plan, lambda choices: choices, rival.can_fit))
        except (ConfigError, DataError, InfeasiblePlanError) as error:
            # A strategy that does not apply (a document beyond its window) leaves the others.
            failure = error
    if not plans:
        assert failure is not None, "there are strategies, and none planned or failed"
        raise failure
    return min(plans, key=lambda planned: step_score(planned[1]))


def _close_to_best(steps: list[tuple[StepProblem, FoundStep]]) -> list[tuple[StepProblem, FoundStep]]:
    """The levels that refining may still make the best, of all searched ones, the best first."""
    if not steps:
        return []
    excess, seconds, _ = steps[0][1].worth()
    return [step for step in steps if step[1].worth()[:2] <= (excess, CLOSE_LEVELS * seconds)][:MOST_REFINED]


def _may_win(rival: Rival, problems: Sequence[StepProblem], found: tuple[ReplicaChoice, ...]) -> bool:
    """Whether a strategy can be faster than what was found, which fits memory or else may always be beaten.

    No plan of whole documents is faster than the longest one, which passes every stage forward and backward in turn.
    And where memory does not bind, a strategy that searches for time alone is as fast as it gets: policies that save
    memory only add to the time of every pack.
    """
    excess, makespan_s, _ = step_score(found)
    if excess:
        return True
    if not rival.cuts and float(problems[0].document_s.max(initial=0.0)) >= makespan_s:
        return False
    if len(problems) == 1 or not rival.bounded:
        return True
    boundless = replace(problems[0], cap_bytes=None)
    return step_score(rival.plan(boundless))[1] < makespan_s


def rules_of(problem: StepProblem) -> SearchRules:
    """As `slimpack` by time alone, and packs of whole documents always."""
    rules = replace(slimpack_rules(problem), worth=by_time)
    return rules if problem.costs.model.causal else replace(rules, first=_whole_trials)


def refine_rules(problem: StepProblem) -> RefineRules:
    """How far `auto` goes on."""
    options = problem.options
    may_split = options.split_backward and problem.layout.num_stages > 1
    return RefineRules(
        variants=lambda trial: [trial._replace(order="list", split=True)] if may_split else [],
        may_split=may_split,
        budget=options.max_candidates,
        time_budget_s=options.time_budget_s,
    )


def step_score(choices: tuple[ReplicaChoice, ...]) -> tuple[int, float, float]:
    """Smaller is better: memory beyond the limit, then the slowest replica, then all."""
    found = [choice.candidate for choice in choices]
    return (
        max(one.excess_bytes for one in found),
        max(one.makespan_s for one in found),
        sum(one.makespan_s for one in found),
    )


def _whole_trials(search: ReplicaSearch) -> list[Trial]:
    """Of a bidirectional model."""
    options, tokens = search.problem.options, int(search.num_tokens.sum())
    counts = pack_counts(tokens, search.problem.layout.pp, options.candidates, options.max_pack_tokens)
    return [Trial(Setting(cut, count)) for count in counts for cut in search.cuts]
