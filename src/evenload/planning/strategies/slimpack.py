"""Plan by `slimpack`: equal-work MicroPacks from exact slices, forward and backward cut separately (SlimPack §4-5).

    phase 1   documents to replicas by forward + backward time (`plan.packing`)
    phase 2   per replica, documents in descending forward work, m = i·pp packs with i log-spaced (§5.1), asymmetric or
              symmetric cuts (`plan.candidates`)
    order     PackFlow's static order with and without the injected forward (§4.2), and the memory-capped list
              schedule; or the one that the options name
    choose    by simulated makespan among the candidates within memory (§4.3); each schedule is searched alone, the
              static one where a few trials put it near

Unlike the paper: exact boundaries instead of a MILP (the same optimum: work is monotone in the cut); time instead of
FLOPs; the list schedule, because memory grows under "one extra forward"; packs of whole documents without a pipeline,
and for documents that replicas share (`plan.dp_merge`). The search over replicas is `plan.search`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.planning.activation_policy import worst_score
from evenload.planning.candidates import (
    Cut,
    Order,
    ReplicaSearch,
    Setting,
    Trial,
    TrialScore,
    orders_of,
    score,
    trial_under,
)
from evenload.planning.cp_sharding import repriced_choices
from evenload.planning.dp_merge import (
    Merge,
    long_merges,
    merge_above_printed,
    merge_documents,
    other_merges,
    unequal_merge,
)
from evenload.planning.packing import assign_replicas, pack_counts
from evenload.planning.problem import CHOOSE, PlanOptions, StepProblem, StrategyOptions
from evenload.planning.search import (
    CLOSE,
    RankedPolicies,
    SearchResult,
    SearchRules,
    best_packs,
    even_out,
    heaviest,
    rank_policies,
    rate_merges,
    search_merged,
    search_step,
    work_s,
)
from evenload.planning.strategies.strategy import Planned, Strategy
from evenload.schedule.packflow import LIST, STATIC
from evenload.schedule.schedule_rule import ScheduleRule

EVENNESS_FACTOR = 1.2  # Uneven cuts win only where they are faster than even ones by more than this
EVEN_REPLICAS = 1.01  # Max/mean time of replicas above which merging documents is tried
EFFICIENT = 0.97
"""Of all ranks' time what the documents take unshared, above which no other groups of replicas are tried."""
SCHEDULES = (LIST.name, STATIC.name)
"""What `plan.options.schedule` "choose" chooses from."""
WAITS_FOR_MEMORY = 0.9
"""The same where memory is limited, below which replicas that end together may still gain from sharing."""
PROMISING = 0.97
"""Ways of sharing, and other schedules, are searched that a few trials put this near to what was found, or below."""
MOST_MERGES = 3  # Ways of sharing that are searched, at most, besides the first
PUBLISHED_ORDER = Order.STATIC_INJECT
PUBLISHED_NOTE = "as published: asymmetric cuts, static order, documents shared above a replica's share of work"
MOST_CONSTANT = 0.1  # Of the documents' time: what the constants of all packs may take
FEWEST_COUNTS = 3  # Numbers of packs that are tried whatever their constants take
ENOUGH_PACKS, ENOUGH_CUTS = 32, 8
"""For every stage, and for every document: more packs than both only cost time, to run and to simulate."""
SHARED_TRIALS = 6  # Best trials of the first replica that the others rate, at most
ALL_SHARED = 48  # Such trials of all replicas together; at least `FEWEST_SHARED` each
FEWEST_SHARED = 3


class SlimpackOptions(StrategyOptions, tag="slimpack"):
    """Set what `slimpack` searches; `auto` starts from the same.

    Args:
        cuts: backward packs are cut on their own ("asymmetric"), are the forward packs reversed ("symmetric"), or the
            faster of both ("choose").
        as_published: plans as SlimPack describes it: asymmetric cuts alone, PackFlow's static order with injected
            forwards, documents shared only above a whole replica's share of the work, no documents moved between
            replicas afterwards, and the fastest by simulation whether its packs are even or not.
        max_imbalance: cuts whose max/mean pack time is within this, forward and backward, are preferred; others are
            used only where none fits memory, or where they are much faster.
    """

    as_published: bool = False
    cuts: Literal["asymmetric", "symmetric", "choose"] = "choose"
    max_imbalance: float = 1.05

    def __post_init__(self) -> None:
        if not self.max_imbalance >= 1:
            raise ConfigError(f"plan options: slimpack.max_imbalance is {self.max_imbalance}, must be at least 1")
        if self.as_published and self.cuts == "symmetric":
            raise ConfigError(
                "plan options: slimpack.as_published is true and slimpack.cuts 'symmetric', but SlimPack cuts forward "
                "and backward packs on their own; leave one out"
            )


def plan_slimpack(problems: Sequence[StepProblem]) -> Planned:
    options = problems[0].options
    steps: list[tuple[StepProblem, SearchResult]] = []
    if options.own(SlimpackOptions).as_published:
        _require_published_order(options)
        first = partial(_first_trials, order=PUBLISHED_ORDER)
        rules = SearchRules(first=first, variants=lambda trial: [], shared=SHARED_TRIALS, even_out=False)
        steps = search_policies(problems, lambda problem: rules)
        if not steps:
            raise _no_packs(problems[0])
        problem, result = steps[0]
        return problem, tuple(replace(choice, note=PUBLISHED_NOTE) for choice in result.choices())
    policies: dict[str, RankedPolicies] = {}
    for schedule in SCHEDULES if options.schedule == CHOOSE else (options.schedule,):
        if steps and not _may_suit(steps[0][1], orders_of(schedule)):
            continue
        by = LIST.name if schedule in (CHOOSE, STATIC.name) else schedule  # rigid orders fit memory by chance
        rules_of = {name: partial(slimpack_rules, orders=orders_of(name)) for name in {schedule, by}}
        if by not in policies:
            policies[by] = rank_policies(problems, rules_of[by])
        steps += _search_ranked(policies[by], rules_of[schedule], rules_of[by])[:1]
    if not steps:
        raise _no_packs(problems[0])
    if any(result.blocks for _, result in steps):
        # What phases take together is known when they are joined; before that, only an upper bound.
        planned = [(problem, result.choices()) for problem, result in steps]
        if any(problem.layout.dp % block.size for problem, result in steps for block in result.blocks):
            # How well groups of such sizes share a document is known as they will run.
            planned = [(problem, repriced_choices(problem, choices)) for problem, choices in planned]
        return min(planned, key=lambda one: worst_score(one[1]))
    problem, result = min(steps, key=lambda step: step[1].score_key()[:2])
    return problem, result.choices()


def _may_suit(result: SearchResult, orders: Sequence[Order | ScheduleRule]) -> bool:
    """Check whether the heaviest replica's best packs are not clearly slower under other orders than under their
    own."""
    busy = [search for search in (*result.own, *result.blocks.values()) if len(search.documents)]
    if not busy:
        return False
    one = heaviest(busy)
    other = one.over(one.documents)
    score([(other, [trial_under(trial.setting, order) for trial in best_packs(one) for order in orders])])
    (excess, seconds), score_key = other.score_key(other.best()), one.score_key(one.best())
    return (excess, PROMISING * seconds) < score_key


def _require_published_order(options: PlanOptions) -> None:
    if options.own(SlimpackOptions).as_published and options.schedule not in (CHOOSE, STATIC.name):
        raise ConfigError(
            f"plan.options.schedule is '{options.schedule}', but plan.options.slimpack.as_published runs PackFlow's "
            "static order; leave one out"
        )


def _no_packs(problem: StepProblem) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"strategy slimpack: no number of packs meets max_pack_tokens {problem.options.max_pack_tokens} with "
        f"slices of at least {problem.options.min_slice_tokens} tokens; raise the one or lower the other"
    )


def search_policies(
    problems: Sequence[StepProblem], rules_of: Callable[[StepProblem], SearchRules]
) -> list[tuple[StepProblem, SearchResult]]:
    """Search the most promising policies, and the next ones while their estimate beats the result; the best first."""
    return _search_ranked(rank_policies(problems, rules_of), rules_of, rank_rules_of=rules_of)


def _search_ranked(
    policies: RankedPolicies,
    rules_of: Callable[[StepProblem], SearchRules],
    rank_rules_of: Callable[[StepProblem], SearchRules],
) -> list[tuple[StepProblem, SearchResult]]:
    """Search as `search_policies`, policies ranked under `rank_rules_of`. Where those are other rules, the first search
    shows by how much these take longer than estimated, for all policies alike."""
    steps: list[tuple[StepProblem, SearchResult]] = []
    longer = 1.0
    for place, ((excess, seconds), problem) in enumerate(policies.ranked):
        if place >= policies.close and steps and _best_score_key(steps) <= (excess, longer * seconds):
            break
        if steps and not problem.effort.may_go_on(_best_score_key(steps)):
            break
        result = search_with_merging(problem, rules_of(problem))
        if result:
            steps.append((problem, result))
            if rules_of is not rank_rules_of and len(steps) == 1 and seconds:
                longer = max(1.0, result.score_key()[1] / seconds)
    (excess, seconds), _ = policies.ranked[0]
    best = _best_score_key(steps) if steps else None
    if policies.others and (best is None or best > (excess, CLOSE * longer * seconds)):
        # The best took longer than estimated, and for its estimate the others were left out.
        others = [problem for problem in policies.others if best is None or (0, work_s(problem)) < best]
        if others and (best is None or others[0].effort.may_go_on(best)):
            steps += _search_ranked(rank_policies(others, rank_rules_of), rules_of, rank_rules_of)
    return sorted(steps, key=lambda step: step[1].score_key())


def _best_score_key(steps: list[tuple[StepProblem, SearchResult]]) -> tuple[int, float]:
    return min(result.score_key()[:2] for _, result in steps)


def slimpack_rules(problem: StepProblem, orders: Sequence[Order | ScheduleRule] | None = None) -> SearchRules:
    """Return rules that try every setting under the first order (default: all that the options allow), the best ones
    under all."""
    orders = orders_of(problem.options.schedule) if orders is None else orders
    # Without a pipeline no pack waits for another, so neither cuts nor evenness are needed.
    has_pipeline = problem.layout.num_stages > 1
    most_uneven = problem.options.own(SlimpackOptions).max_imbalance if has_pipeline else float("inf")
    return SearchRules(
        first=partial(_first_trials, order=orders[0]),
        variants=lambda trial: [trial._replace(order=order) for order in orders[1:]],
        fallback=partial(_fallback_trials, order=orders[0]),
        score_key=partial(_score_key, most_uneven),
        shared=min(SHARED_TRIALS, max(FEWEST_SHARED, ALL_SHARED // problem.layout.dp)),
    )


def search_with_merging(problem: StepProblem, rules: SearchRules) -> SearchResult | None:
    """Search replicas apart and, where they end apart or lack memory, with documents that groups of them share."""
    apart = search_step(problem, assign_replicas(problem.document_s, problem.layout.dp), rules)
    if not problem.shares_documents or (apart and _is_good(problem, apart)):
        return apart
    if problem.options.own(SlimpackOptions).as_published:
        return _better(apart, _search_merges(problem, [merge_above_printed(problem)], rules, apart))
    merge = merge_documents(problem)
    best = _better(apart, _search_merges(problem, [merge], rules, apart))
    if best and _is_good(problem, best) and (merge is None or _efficiency(problem, best) >= EFFICIENT):
        return best
    if best and not problem.effort.may_go_on(best.score_key()[:2]):
        return best
    others = [*other_merges(problem, merge), *long_merges(problem)] if merge else long_merges(problem)
    rated = sorted(zip(rate_merges(problem, others, rules), range(len(others)), strict=True))
    score_key = None if best is None else best.score_key()[:2]
    keys = [((excess, PROMISING * seconds), at) for (excess, seconds), at in rated]
    promising = [others[at] for key, at in keys if score_key is None or key < score_key]
    # Documents move only in the best of them: that takes as many trials as a search, and gains little.
    tried = _search_merges(problem, promising[:MOST_MERGES], replace(rules, even_out=False), apart)
    result = _better(None, tried)
    if result and rules.even_out:
        even_out(result)
    return _or_unequal(problem, rules, apart, _better(best, [result]))


def _or_unequal(
    problem: StepProblem, rules: SearchRules, apart: SearchResult | None, best: SearchResult | None
) -> SearchResult | None:
    """Return groups of unequal sizes where they are faster as they will run: how well so many ranks share a document
    and how well phases fill each other's gaps is not known before."""
    if best is None or not problem.layout.has_blocks_of_any_size or (merge := unequal_merge(problem)) is None:
        return best
    excess, seconds = rate_merges(problem, [merge], rules)[0]
    # The estimate is a bound, so it has to be clearly better.
    if (excess, seconds / PROMISING) >= best.score_key()[:2]:
        return best
    (other,) = _search_merges(problem, [merge], rules, apart)
    if other is None or other.score_key() >= best.score_key():
        return best
    return min((best, other), key=lambda one: worst_score(repriced_choices(problem, one.choices())))


def _search_merges(
    problem: StepProblem, merges: Sequence[Merge | None], rules: SearchRules, apart: SearchResult | None
) -> list[SearchResult | None]:
    seconds, share = 0.0 if apart is None else float(apart.seconds().sum()), 1.0
    if seconds:
        share = min(1.0, float(problem.document_s.sum()) / (problem.layout.pp * seconds))
    return [search_merged(problem, merge, rules, share) for merge in merges if merge]


def _better(one: SearchResult | None, others: Sequence[SearchResult | None]) -> SearchResult | None:
    return min((result for result in (one, *others) if result), key=SearchResult.score_key, default=None)


def _efficiency(problem: StepProblem, result: SearchResult) -> float:
    """Return the seconds of the documents on their own replicas, all stored, over those of all ranks until the slowest
    ends."""
    available_s = problem.layout.dp * problem.layout.pp * float(result.seconds().max())
    return problem.stored_s / available_s if available_s else 1.0


def _is_good(problem: StepProblem, result: SearchResult) -> bool:
    """Check whether sharing gains nothing: replicas end together, within memory, and do not wait for memory."""
    seconds = result.seconds()
    is_even = not result.score_key()[0] and seconds.max() <= EVEN_REPLICAS * seconds.mean()
    return bool(is_even and (problem.cap_bytes is None or _efficiency(problem, result) >= WAITS_FOR_MEMORY))


def _score_key(max_imbalance: float, rated: TrialScore) -> tuple[int, float]:
    """Rank by excess memory, then by time, uneven cuts `EVENNESS_FACTOR` times slower."""
    is_even = max(rated.imbalance_forward, rated.imbalance_backward) <= max_imbalance
    return rated.excess_bytes, rated.makespan_s * (1.0 if is_even else EVENNESS_FACTOR)


def _first_trials(search: ReplicaSearch, order: Order | ScheduleRule) -> list[Trial]:
    options, layout = search.problem.options, search.problem.layout
    cuts: tuple[Cut, ...] = ("asymmetric", "symmetric")
    own = options.own(SlimpackOptions)
    if not search.problem.costs.model.may_cut_documents:
        cuts = search.cuts
    elif own.as_published:
        cuts = ("asymmetric",)
    elif own.cuts != "choose":
        cuts = (own.cuts,)
    elif "whole" in search.cuts and (layout.num_stages == 1 or search.ranks > layout.cp):
        # A shared document that is cut keeps all its keys and values on every rank; a whole one keeps a share.
        cuts = (*cuts, "whole")
    return [trial_under(Setting(cut, count), order) for count in _counts(search) for cut in cuts]


def _counts(search: ReplicaSearch) -> list[int]:
    """List numbers of packs that are not more than enough and whose constants take at most `MOST_CONSTANT` of the
    documents' time; a few always."""
    problem = search.problem
    options, pp = problem.options, problem.layout.pp
    counts = pack_counts(int(search.num_tokens.sum()), pp, options.candidates, options.max_pack_tokens)
    enough = max(ENOUGH_PACKS * pp, ENOUGH_CUTS * len(search.documents))
    most = min(MOST_CONSTANT * search.work_s / problem.costs.pack_constant_s, enough)
    return [*counts[:FEWEST_COUNTS], *(count for count in counts[FEWEST_COUNTS:] if count <= most)]


def _fallback_trials(search: ReplicaSearch, order: Order | ScheduleRule) -> list[Trial]:
    """Return packs of whole documents: of a document that is cut, a rank keeps all K and V, and sums of gradients."""
    options = search.problem.options
    if "whole" not in search.cuts or options.own(SlimpackOptions).cuts != "choose":
        return []
    return [trial_under(Setting("whole", count), order) for count in _counts(search)]


SLIMPACK = Strategy(
    name="slimpack",
    description="cuts documents into slices; forward and backward packs of equal work, chosen by simulation",
    search=lambda problems, others: plan_slimpack(problems),
    options=SlimpackOptions,
    require_options=_require_published_order,
    cuts_documents=True,
    shares_documents=True,
    plans_trees=True,
)
