"""`auto`: one optimiser over all strategies, scored by simulated time within memory.

    1  `slimpack`'s search by time alone, even cuts or not, with and without documents that replicas share
    2  where several activation policies come close, each of the best (`plan.search.refine_step`): split
       backwards and other schedules of the best packs, then neighbours of the best trials (`plan.search.trial_space`):
       look-ahead, tapered ends, token weight, pack count, cut; the slowest replica last; then the packs found under
       ZB-H1
    3  every other strategy that plans a step by itself, unless it cannot win: its plan is a candidate as it is

The best of each is then priced as it will run, rank by rank where ranks share packs, and the fastest taken. So `auto`
is never worse than any of them on the same step and layout. A strategy of whole documents cannot win where the longest
document alone, through all stages and back, takes longer than what was found.

Deterministic: the budget is a number of simulations (`max_candidates`). `time_budget_s` ends the search by the
clock instead and is off by default, because the plan then depends on the machine.

The strategies solved by an exact solver are left out: they take seconds, and what they solve (equal windows of
whole documents) is not what bounds a step here.
"""

from collections.abc import Sequence
from dataclasses import replace

from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.plan.packing.pack_counts import pack_counts
from evenload.plan.problem.options import CHOOSE, StrategyOptions
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.search.found_step import FoundStep
from evenload.plan.search.host_order import beyond_memory_bytes, ordered_within_host
from evenload.plan.search.policy_choice import work_s, worst_score
from evenload.plan.search.probe_rating import SearchRules
from evenload.plan.search.refine_step import RefineRules, refine
from evenload.plan.search.replica_search import ReplicaSearch, by_time
from evenload.plan.search.trial_space import Setting, Trial, trial_under
from evenload.plan.sharing.as_run import choices_as_run
from evenload.plan.strategies.slimpack import SLIMPACK, plan_slimpack, search_policies, slimpack_rules
from evenload.plan.strategies.strategy import Planned, Strategy
from evenload.schedule.packflow import LIST
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.schedule.step_ends import step_end

CLOSE_POLICIES = 1.06
"""Refining gains so much, so policies within it of the best are refined too."""
MOST_REFINED = 3
"""Policies that are refined, at most."""
NO_GAIN = 1.001
"""Of what no plan of a strategy is faster than: another policy of it is not worth a plan."""


BOTH_ENDS = (((1, 1), 1), ((2, 2), 2))
"""Halvings of the first forward and of the last backward pack, and weights of a token, that are tried on the best."""


class AutoOptions(StrategyOptions, tag="auto"):
    """How far `auto` searches.

    Args:
        split_backward: backwards may run as two actions, weight gradients later (zero bubble).
        max_candidates: schedules simulated beyond `slimpack`'s in a step, over all replicas, for every set of
            activation policies that comes close.
        time_budget_s: the search also ends by the clock; None = never, because plans then depend on the machine.

    Raises:
        ConfigError: no candidates, or no time.
    """

    split_backward: bool = True
    max_candidates: int = 128
    time_budget_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_candidates < 1:
            raise ConfigError(f"plan options: auto.max_candidates is {self.max_candidates}, must be at least 1")
        if self.time_budget_s is not None and not self.time_budget_s > 0:
            raise ConfigError(f"plan options: auto.time_budget_s is {self.time_budget_s}, must be above 0")


def plan_auto(problems: Sequence[StepProblem], others: Sequence[Strategy]) -> Planned:
    """`others` are candidates as they are, but those that need a solver or choose a layout. Where nothing can plan the
    step, the error is the last strategy's."""
    # As it runs, because that is what others are compared with.
    plans: list[Planned] = [(problem, _as_run(problem, found.choices())) for problem, found in searched(problems)[:1]]
    failure: Exception | None = None
    if problems[0].costs.model.causal:
        try:
            plans.append(plan_slimpack(problems))
        except (ConfigError, InfeasiblePlanError) as error:
            failure = error
    for rival in others:
        if rival.needs_solver or rival.changes_layout or rival.tries_others or rival is SLIMPACK:
            continue
        try:
            least_s = _least_seconds(rival, problems, plans[0][1]) if plans else 0.0
            if least_s is None:
                continue
            asked = _worth_asking(problems, plans[0][1]) if plans else problems
            problem, answer = rival.plan_step(asked, enough_s=NO_GAIN * least_s)
            plans.append((problem, answer.choices))
        except (ConfigError, DataError, InfeasiblePlanError) as error:
            # A strategy that does not apply (a document beyond its window) leaves the others.
            failure = error
    if not plans:
        assert failure is not None, "there are strategies, and none planned or failed"
        raise failure
    as_run = least_beyond_memory([(problem, _as_run(problem, choices)) for problem, choices in plans])
    best = min(as_run, key=lambda planned: step_score(planned[1]))
    # What follows the packs is not the same for all: it decides between those whose packs alone end early enough.
    excess, limit_s = step_score(best[1])[0], _summed_s(*best)
    close = [planned for planned in as_run if step_score(planned[1])[:2] <= (excess, limit_s)]
    return min(close, key=lambda planned: (step_score(planned[1])[0], _summed_s(*planned), *step_score(planned[1])))


def _as_run(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> tuple[ReplicaChoice, ...]:
    """Choices as they run, in an order that host memory holds where there is one."""
    as_run = choices_as_run(problem, choices)
    return tuple(ordered_within_host(problem, choice) or choice for choice in as_run)


def least_beyond_memory(plans: list[Planned]) -> list[Planned]:
    """Those that exceed memory by the least, of devices and hosts together: all that fit, where some do.

    The host's does not count first: a device's share is less than what it may have of a node, and no plan beyond a
    device's memory runs.
    """
    beyond = [max(beyond_memory_bytes(problem, choice) for choice in choices) for problem, choices in plans]
    return [planned for planned, excess in zip(plans, beyond, strict=True) if excess == min(beyond)]


def searched(problems: Sequence[StepProblem]) -> list[tuple[StepProblem, FoundStep]]:
    """What the search by time finds under each of the policies that come close, the best first; none where no packs
    meet the limits."""
    steps = _close_to_best(search_policies(problems, rules_of))
    for problem, found in steps:
        refine(found, refine_rules(problem))
    return sorted(steps, key=lambda step: step[1].worth())


def _close_to_best(steps: list[tuple[StepProblem, FoundStep]]) -> list[tuple[StepProblem, FoundStep]]:
    """The policies that refining may still make the best, of all searched ones, the best first."""
    if not steps:
        return []
    excess, seconds, _ = steps[0][1].worth()
    return [step for step in steps if step[1].worth()[:2] <= (excess, CLOSE_POLICIES * seconds)][:MOST_REFINED]


def _worth_asking(problems: Sequence[StepProblem], found: tuple[ReplicaChoice, ...]) -> list[StepProblem]:
    """The policies whose work alone, spread evenly, takes less than what was found, where that fits memory."""
    if step_score(found)[0]:
        return list(problems)
    summed_s = _summed_s(problems[0], found)
    return [problem for problem in problems if problem is problems[0] or work_s(problem) < summed_s]


def _least_seconds(rival: Strategy, problems: Sequence[StepProblem], found: tuple[ReplicaChoice, ...]) -> float | None:
    """What no plan of a strategy is faster than, 0 = not known; None where none can be faster than what was
    found, which fits memory or else may always be beaten.

    No plan of whole documents is faster than the longest one, which passes every stage forward and backward in turn
    (where backwards are split, only I does, so that is no bound). And where memory does not bind, a strategy that
    searches for time alone is as fast as it gets: policies that save memory only add to the time of every pack.
    """
    excess, summed_s = step_score(found)[0], _summed_s(problems[0], found)
    if excess:
        return 0.0
    splits = problems[0].options.rule(ONE_F_ONE_B).splits_backward
    least_s = float(problems[0].document_s.max(initial=0.0))
    if rival.keeps_whole and not splits and least_s >= summed_s:
        return None
    if len(problems) == 1 or not rival.ignores_memory:
        return 0.0
    _, boundless = rival.plan_step([replace(problems[0], cap_bytes=None)])
    boundless_s = step_score(boundless.choices)[1]
    return boundless_s if boundless_s < summed_s else None


def rules_of(problem: StepProblem) -> SearchRules:
    """As `slimpack` by time alone, and packs of whole documents always."""
    rules = replace(slimpack_rules(problem), worth=by_time)
    return rules if problem.costs.model.causal else replace(rules, first=_whole_trials)


def refine_rules(problem: StepProblem) -> RefineRules:
    """How far `auto` goes on."""
    options, layout, asked = problem.options.own(AutoOptions), problem.layout, problem.options.schedule
    may_reorder = asked in (CHOOSE, LIST.name)
    may_split = may_reorder and asked == CHOOSE and options.split_backward and layout.num_stages > 1
    others = [
        rule.name
        for rule in SCHEDULES.values()
        if rule.tried_by_auto
        and asked == CHOOSE
        and layout.pp > 1
        and (may_split or not rule.splits_backward)
        and not (rule.one_stage_per_rank and layout.num_stages > layout.pp)
    ]
    return RefineRules(
        variants=lambda trial: [trial._replace(order=LIST.name, split=True)] if may_split else [],
        tapered=lambda trial: _tapered(trial, layout.pp) if may_split else [],
        others=lambda trial: [trial_under(trial.setting, name) for name in others],
        may_split=may_split,
        may_reorder=may_reorder,
        budget=options.max_candidates,
        time_budget_s=options.time_budget_s,
    )


def _summed_s(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> float:
    """When all gradients are summed; what comes then takes the same after every plan."""
    return step_end(problem.costs, [choice.candidate.simulated() for choice in choices]).summed_s


def _tapered(trial: Trial, pp: int) -> list[Trial]:
    """Smaller packs where the pipeline fills and drains, and I and W: several steps of the search at once, because one
    alone rarely pays. Few packs then do, which helps where documents are short."""
    setting = trial.setting
    if setting.cut == "whole":
        return []
    counts = dict.fromkeys(
        max(pp, count // pp * pp) for count in (setting.num_packs * part // 4 for part in (3, 4, 5, 6))
    )
    return [
        Trial(setting._replace(num_packs=count, token_weight=weight, taper=taper), LIST.name, split=True)
        for count in counts
        for taper, weight in BOTH_ENDS
    ]


def step_score(choices: tuple[ReplicaChoice, ...]) -> tuple[int, float, float]:
    """Smaller is better: memory beyond the limit, then the slowest replica, then all."""
    return *worst_score(choices), sum(choice.candidate.makespan_s for choice in choices)


def _whole_trials(search: ReplicaSearch) -> list[Trial]:
    options, tokens = search.problem.options, int(search.num_tokens.sum())
    counts = pack_counts(tokens, search.problem.layout.pp, options.candidates, options.max_pack_tokens)
    return [Trial(Setting(cut, count)) for count in counts for cut in search.cuts]


AUTO = Strategy(
    name="auto",
    description="plans with every strategy and takes the fastest in simulation, within memory",
    search=plan_auto,
    options=AutoOptions,
    cuts_documents=True,
    shares_documents=True,
    tries_others=True,
    follows_layouts=True,
)
