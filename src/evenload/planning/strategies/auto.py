"""Plan by `auto`: one optimiser over all strategies, scored by simulated time within memory.

    1  `slimpack`'s search by time alone, even cuts or not, with and without documents that replicas share
    2  under each of the activation policies that come close, the heaviest replica is improved (tapered ends of its best
       packs, then neighbours of its best trials), the others rate the best few of those, replicas are evened out again,
       and what is left of the budget goes to the slowest replica, at last under the other schedules, too
    3  every other strategy that plans a step by itself, unless it cannot win: its plan is a candidate as it is; that of
       `slimpack` alone only where ranks or host memory made the plan above slower than its search said

The best of each is then repriced, rank by rank where ranks share packs, and the fastest taken, so `auto` is never
worse than any of them, but for `slimpack`: where its plan was left out, by 2 % or as the search was cut short.
Strategies of an exact solver are left out: they take seconds. The budget is a number of simulations
(`max_candidates`), and as many as a step lasts (`planning_share`, by `problem.Effort`), so plans are deterministic
unless `time_budget_s` ends the search by the clock.
"""

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.planning.activation_policy import host_excess_bytes, ordered_within_host, worst_score
from evenload.planning.candidates import Order, ReplicaSearch, Setting, Trial, by_time, score, score_of, trial_under
from evenload.planning.cp_sharding import repriced_choices
from evenload.planning.packing import pack_counts
from evenload.planning.problem import CHOOSE, ReplicaChoice, SlowerPlanError, StepProblem, StrategyOptions
from evenload.planning.search import SearchResult, SearchRules, best_packs, even_out, heaviest, share_best, work_s
from evenload.planning.strategies.slimpack import SLIMPACK, search_policies, slimpack_rules
from evenload.planning.strategies.strategy import Planned, Strategy
from evenload.schedule.packflow import LIST
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.schedule.step_collectives import step_end
from evenload.types.base import require_at_least_one

PROBE_SHARE = 0.5  # Of the budget: what the first replica may use to find good trials for all
SLOWEST_SHARE = 0.5  # Of what is left: what one search of the slowest replica may use at a time
TAPERED = 2  # Best settings of the improved representative replica that are tried with smaller packs at both ends
REFINED_SHARED = 8  # Best trials of the improved representative replica that every replica rates
LATE = 1.01  # Of the median time of replicas: one above it rates more of the improved representative's trials
LATE_SHARED = 24  # How many more at most
WORTH_IT = 0.999  # Of the best time: what another schedule must get below to be taken
CLOSE_POLICIES = 1.02  # Refining changes few orders of policies: those within it of the best are refined too
MOST_REFINED = 3  # Policies that are refined, at most
AS_SEARCHED = 1.02  # Of the seconds that a search says: a plan within it is not compared with `slimpack`'s
NO_GAIN = 1.001  # Of what no plan of a strategy is faster than: within it no other policy is planned
BOTH_ENDS = (((1, 1), 1), ((2, 2), 2))
"""Halvings of the first forward and of the last backward pack, and weights of a token, that are tried on the best."""


class _Refinement:
    """Improve the result of a search within a budget of trials; those that every replica needs are always rated."""

    def __init__(self, problem: StepProblem, result: SearchResult) -> None:
        options, layout, schedule = problem.options.own(AutoOptions), problem.layout, problem.options.schedule
        self._found, self._effort = result, problem.effort
        self._may_split = schedule == CHOOSE and options.split_backward and layout.num_stages > 1
        self._may_reorder = schedule in (CHOOSE, LIST.name)
        self._others = [
            rule
            for rule in SCHEDULES.values()
            if rule.tried_by_auto
            and schedule == CHOOSE
            and layout.pp > 1
            and (self._may_split or not rule.splits_backward)
            and not (rule.one_stage_per_rank and layout.num_stages > layout.pp)
        ]
        self._trials, limit_s = options.max_candidates, options.time_budget_s
        self._deadline_s = math.inf if limit_s is None else time.monotonic() + limit_s

    def run(self) -> None:
        result = self._found
        for search in (*result.own, *result.blocks.values()):
            search.rank_by(by_time)
        busy = [search for search in result.own if len(search.documents)]
        if not busy:
            return
        representative = heaviest(busy)
        if self._may_split:
            varied = [representative, *result.blocks.values()]
            splits = [[trial._replace(order=Order.LIST, split=True) for trial in best_packs(one)] for one in varied]
            score(list(zip(varied, splits, strict=True)))
            if not representative.is_near_bound():
                best = best_packs(representative)[:TAPERED]
                score([(representative, [other for trial in best for other in _tapered(trial, representative)])])
        self._improve(representative, PROBE_SHARE)
        share_best(representative, [search for search in busy if search is not representative], REFINED_SHARED)
        seconds = result.seconds()
        is_late = seconds > LATE * np.median(seconds)
        late = [search for search, slow in zip(result.own, is_late, strict=True) if slow and search in busy]
        share_best(representative, late, LATE_SHARED)
        even_out(result)
        while self._left():
            # The step waits for the slowest, so the others need no search.
            if not sum([self._improve(search, SLOWEST_SHARE) for search in self._slowest()]):
                break
        even_out(result)
        self._try_others()

    def _slowest(self) -> list[ReplicaSearch]:
        """Return the searches of the slowest replica, those of shared documents first."""
        slowest = int(self._found.seconds().argmax())
        shared = [self._found.blocks[block] for block in self._found.blocks_of(slowest)]
        return [search for search in (*shared, self._found.own[slowest]) if len(search.documents)]

    def _left(self) -> int:
        if self._trials and time.monotonic() > self._deadline_s:
            self._effort.is_cut_short = True
            return 0
        return self._trials if self._trials and self._may_go_on() else 0

    def _may_go_on(self) -> bool:
        return self._effort.may_go_on(self._found.score_key()[:2])

    def _improve(self, search: ReplicaSearch, share: float) -> bool:
        """Rate neighbours of the best trials while the share of the budget lasts; return whether the best improved."""
        before, keep = search.score_key(search.best()), int((1 - share) * self._left())
        while self._left() > keep and not search.is_near_bound():
            around = search.frontier(may_split=self._may_split, may_reorder=self._may_reorder)
            if not around:
                break
            self._trials -= score([(search, around[: self._left()])])
        return search.score_key(search.best()) < before

    def _try_others(self) -> None:
        """Try other schedules on the best packs of the slowest replica while the step gets faster."""
        score_key = (math.inf, math.inf, math.inf)
        while self._found.score_key() < score_key and self._may_go_on():
            score_key = self._found.score_key()
            for search in self._slowest():
                if search.is_near_bound():
                    continue
                best, packs = search.best(), best_packs(search)
                for other in [trial_under(trial.setting, rule) for trial in packs for rule in self._others]:
                    made = score_of(search.build(other))
                    # What is the same to rounding stays as it was.
                    if made is not None and by_time(made) < (best.excess_bytes, WORTH_IT * best.makespan_s):
                        search.add(other, made)


class AutoOptions(StrategyOptions, tag="auto"):
    """Set how far `auto` searches.

    Args:
        split_backward: backwards may run as two actions, weight gradients later (zero bubble).
        max_candidates: schedules simulated beyond `slimpack`'s in a step, over all replicas, for every set of
            activation policies that comes close.
        planning_share: of the predicted step time, what the search may take, counted in trials at a fixed price
            (`planning/problem.py`) and not by the clock: 1 = a step's plan is ready when the step before it ends.
            Metrics and plans say where the search was cut short (`plan_cut_short`).
        time_budget_s: the search also ends by the clock; None = never, because plans then depend on the machine.

    Raises:
        ConfigError: no candidates, or no time.
    """

    split_backward: bool = True
    max_candidates: int = 128
    planning_share: float = 1.0
    time_budget_s: float | None = None

    def __post_init__(self) -> None:
        require_at_least_one("plan options: auto.", self, "max_candidates")
        if not self.planning_share > 0:
            raise ConfigError(f"plan options: auto.planning_share is {self.planning_share}, must be above 0")
        if self.time_budget_s is not None and not self.time_budget_s > 0:
            raise ConfigError(f"plan options: auto.time_budget_s is {self.time_budget_s}, must be above 0")


def plan_auto(problems: Sequence[StepProblem], others: Sequence[Strategy]) -> Planned:
    """Plan a step by `slimpack`'s search and by `others`, but those that need a solver or choose a layout. Where
    nothing can plan the step, the error is the last strategy's."""
    effort, summed_s = problems[0].effort, functools.cache(_summed_s)
    effort.share = problems[0].options.own(AutoOptions).planning_share
    steps = _searched(problems)[:1]
    plans: list[Planned] = [(problem, _repriced(problem, one.choices())) for problem, one in steps]
    # What the others have to beat, and under which policies they may.
    excess, limit_s = score_key = (_excess_bytes(*plans[0]), summed_s(*plans[0])) if plans else (1, math.inf)
    promising = problems if excess else [one for one in problems if one is problems[0] or work_s(one) < limit_s]
    failure: Exception | None = None
    effort.to_beat = None if excess else (0, limit_s)
    for rival in others:
        if rival.needs_solver or rival.changes_layout or rival.tries_others:
            continue
        # The others take little of a step and plan even where the search was cut short.
        if rival is SLIMPACK and steps and (_is_as_searched(steps[0][1], plans[0]) or not effort.may_go_on(score_key)):
            continue
        try:
            least_s = 0.0 if excess else _least_seconds(rival, problems, limit_s)
            if least_s is None:
                continue
            problem, answer = rival.plan_step(promising, enough_s=NO_GAIN * least_s)
            plans.append((problem, _repriced(problem, answer.choices)))
        except (ConfigError, DataError, InfeasiblePlanError, SlowerPlanError) as error:
            # A strategy that does not apply (a document beyond its window) leaves the others.
            failure = error
    if not plans:
        assert failure is not None, "there are strategies, and none planned or failed"
        raise failure
    # Those that exceed memory by the least, of devices and hosts together; all that fit, where some do.
    excesses = [_excess_bytes(*planned) for planned in plans]
    plans = [planned for planned, excess in zip(plans, excesses, strict=True) if excess == min(excesses)]
    best = min(plans, key=lambda planned: step_score(planned[1]))
    # What follows the packs is not the same for all: it decides between those whose packs alone end early enough.
    excess, limit_s = step_score(best[1])[0], summed_s(*best)
    close = [planned for planned in plans if step_score(planned[1])[:2] <= (excess, limit_s)]
    return min(close, key=lambda planned: (step_score(planned[1])[0], summed_s(*planned), *step_score(planned[1])))


def _excess_bytes(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> int:
    return max(one.candidate.excess_bytes + host_excess_bytes(problem, one.candidate) for one in choices)


def _is_as_searched(result: SearchResult, planned: Planned) -> bool:
    """Check whether a plan takes about what its search said, which rates what `slimpack` does and goes on from there:
    then `slimpack` alone gains nothing. Host memory and shares of ranks, which come after, may suit another better."""
    excess, seconds = result.score_key()[:2]
    return step_score(planned[1])[:2] <= (excess, AS_SEARCHED * seconds)


def _repriced(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> tuple[ReplicaChoice, ...]:
    return tuple(ordered_within_host(problem, one) or one for one in repriced_choices(problem, choices))


def _searched(problems: Sequence[StepProblem]) -> list[tuple[StepProblem, SearchResult]]:
    """Search by time under the policies that come close, the best first; none where no packs fit limits."""
    steps = search_policies(problems, rules_of)
    keys = [result.score_key()[:2] for _, result in steps]
    # Refining may still make the policies that come close the best.
    close = [step for step, key in zip(steps, keys, strict=True) if key <= (keys[0][0], CLOSE_POLICIES * keys[0][1])]
    steps = close[:MOST_REFINED]
    for problem, result in steps:
        _Refinement(problem, result).run()
    return sorted(steps, key=lambda step: step[1].score_key())


def _least_seconds(rival: Strategy, problems: Sequence[StepProblem], limit_s: float) -> float | None:
    """Bound the seconds of a strategy's plans, 0 = not known; None where none can take less than `limit_s`: no plan of
    whole documents is faster than the longest one through all stages and back (but where only I passes), and where
    memory does not bind, a strategy that searches for time alone is as fast as it gets."""
    splits = problems[0].options.rule(ONE_F_ONE_B).splits_backward
    least_s = float(problems[0].document_s.max(initial=0.0))
    if rival.keeps_whole and not splits and least_s >= limit_s:
        return None
    if len(problems) == 1 or not rival.ignores_memory:
        return 0.0
    _, boundless = rival.plan_step([replace(problems[0], cap_bytes=None)])
    boundless_s = step_score(boundless.choices)[1]
    return boundless_s if boundless_s < limit_s else None


def rules_of(problem: StepProblem) -> SearchRules:
    """Return the rules of `slimpack` by time alone, always with packs of whole documents."""
    rules = replace(slimpack_rules(problem), score_key=by_time)
    return rules if problem.costs.model.may_cut_documents else replace(rules, first=_whole_trials)


def _summed_s(problem: StepProblem, choices: tuple[ReplicaChoice, ...]) -> float:
    return step_end(problem.costs, [choice.candidate for choice in choices]).summed_s


def _tapered(trial: Trial, search: ReplicaSearch) -> list[Trial]:
    """Return trials with smaller packs at both ends, and I and W: several steps of the search at once, because one
    alone rarely pays."""
    setting, pp = trial.setting, search.problem.layout.pp
    if setting.cut == "whole":
        return []
    counts = dict.fromkeys(max(pp, setting.num_packs * part // 4 // pp * pp) for part in (3, 4, 5, 6))
    return [
        Trial(setting._replace(num_packs=count, token_weight=weight, taper=taper), Order.LIST, split=True)
        for count in counts
        for taper, weight in BOTH_ENDS
    ]


def step_score(choices: tuple[ReplicaChoice, ...]) -> tuple[int, float, float]:
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
    plans_trees=True,
)
