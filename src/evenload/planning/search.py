"""Search over all replicas of a step, for `slimpack` and `auto`.

    1  the heaviest replica, and the one with the longest document, rate the first trials, then other schedules of the
       best packs
    2  every other replica, which holds nearly equal work, rates the best few of those
    3  replicas are evened out: short documents move from the slowest to the fastest, by simulated time

Documents that groups of replicas share (`plan.dp_merge`) come before, each block's in its own search; a way of sharing
is first rated by a few trials of its heaviest searches (`rate_merges`), and so are activation policies
(`rank_policies`). Effort is counted in trials, so plans are deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.planning.activation_policy import ordered_within_host
from evenload.planning.candidates import (
    CUTS,
    Order,
    ReplicaSearch,
    Setting,
    Trial,
    TrialScore,
    by_time,
    idle_candidate,
    score,
)
from evenload.planning.dp_merge import Merge, in_phases, long_merges, merge_documents, uniform_merges
from evenload.planning.packing import assign_replicas
from evenload.planning.problem import ReplicaChoice, StepProblem
from evenload.types.document import ReplicaBlock

VARIED = 4  # Best settings of a representative replica whose packs are tried under other schedules
MORE_PACKS = 12  # Doublings of the pack count where no cut meets the token limit
EVEN_REPLICAS = 1.003  # Max/mean time of replicas at which no more documents move
MOST_MOVES = 2  # Documents moved, for each replica
# Of the gap between the slowest and the fastest replica: documents that are tried, until one helps.
MOVED_SHARES = (0.5, 0.25, 0.1)
MOVED_TRIALS = 3  # Best trials of a replica that are rated again when its documents change
FEW_SLICED = slice(1, None, 2)  # Pack counts that are tried of slices: few and many, which memory may ask for
FEW_WHOLE = 2  # Pack counts that are tried of whole documents, up to one document a pack
FEW_DOCUMENTS = 8  # Documents whose trials are so cheap that all are rated
ENOUGH_WHOLE = 8  # Documents for every stage with which whole ones fill a pipeline, so that slices need not be tried

CLOSE = 1.02  # Policies whose estimates differ by less count as close
MOST_CLOSE = 2  # Policies that are searched because they are close, at most


@dataclass(frozen=True)
class SearchRules:
    """Set how far to search.

    Args:
        first: trials that representative replicas rate; variants: of a trial, the same packs under other schedules.
        fallback: trials for a replica that nothing else fits into memory.
        shared: best trials of the representative replica that every replica rates.
    """

    first: Callable[[ReplicaSearch], list[Trial]]
    variants: Callable[[Trial], list[Trial]]
    fallback: Callable[[ReplicaSearch], list[Trial]] = lambda search: []
    score_key: Callable[[TrialScore], tuple[int, float]] = by_time
    shared: int = 3
    even_out: bool = True

    def search(self, problem: StepProblem, documents: NDArray[np.int64], replicas: int = 1) -> ReplicaSearch:
        """Begin a search over documents that so many replicas share."""
        return ReplicaSearch(problem, documents, replicas * problem.layout.cp, self.score_key)


def heaviest(searches: list[ReplicaSearch]) -> ReplicaSearch:
    return max(searches, key=lambda search: search.work_s)


def _heaviest_and_longest(searches: list[ReplicaSearch]) -> list[ReplicaSearch]:
    longest = max(searches, key=lambda search: int(search.num_tokens.max()))
    return list(dict.fromkeys((heaviest(searches), longest)))


def rate_by_representative(searches: list[ReplicaSearch], first: list[ReplicaSearch], rules: SearchRules) -> bool:
    """Rate the first trials on all of `first`, whose first one represents the replicas, the best of those on the
    others; return whether all have a trial."""
    rate_first(first, rules)
    representative = first[0]
    if not has_trial(representative) and not _rate_more_packs(representative, rules):
        return False
    others = [search for search in searches if search is not representative]
    share_best(representative, others, rules.shared)
    # Where the representative replica's trials do not fit, or cannot cut these documents, everything is tried.
    lacking = [search for search in others if _lacks(search, representative)]
    rate_first(lacking, rules)
    return all(has_trial(search) or _rate_more_packs(search, rules) for search in lacking)


def rate_first(searches: list[ReplicaSearch], rules: SearchRules) -> None:
    score([(search, rules.first(search)) for search in searches])
    score([(search, [v for trial in best_packs(search) for v in rules.variants(trial)]) for search in searches])


def best_packs(search: ReplicaSearch) -> list[Trial]:
    """Return the best trial of each of the best settings."""
    result: dict[Setting, Trial] = {}
    for trial in search.ranking():
        result.setdefault(trial.setting, trial)
    return list(result.values())[:VARIED]


def share_best(representative: ReplicaSearch, others: list[ReplicaSearch], count: int) -> None:
    trials = representative.ranking()[:count]
    score([(search, trials) for search in others])


def _lacks(search: ReplicaSearch, representative: ReplicaSearch) -> bool:
    """Check for a search without a trial, or without one that fits memory or is as good by `score_key` as its seconds,
    although the representative has such."""
    if not has_trial(search):
        return True
    here, there = search.best(), representative.best()
    if here.excess_bytes:
        return not there.excess_bytes
    return search.score_key(here)[1] > here.makespan_s and representative.score_key(there)[1] <= there.makespan_s


def has_trial(search: ReplicaSearch) -> bool:
    return any(result is not None for result in search.scores.values())


def _rate_more_packs(search: ReplicaSearch, rules: SearchRules) -> bool:
    """Rate more packs, which make every rest of a cut shorter: symmetric cuts cannot always meet a token limit."""
    trials = rules.first(search)
    for _ in range(MORE_PACKS):
        trials = [t._replace(setting=t.setting._replace(num_packs=2 * t.setting.num_packs)) for t in trials]
        score([(search, trials)])
        if has_trial(search):
            return True
    return False


@dataclass(frozen=True, eq=False)
class SearchResult:
    """Hold searches with a best trial each: what replicas run alone, and before that what groups of them share; larger
    blocks first."""

    own: list[ReplicaSearch]
    blocks: dict[ReplicaBlock, ReplicaSearch]

    def blocks_of(self, replica: int) -> list[ReplicaBlock]:
        return [block for block in self.blocks if replica in block.replicas]

    def seconds(self) -> NDArray[np.float64]:
        """Return the simulated time of every replica; float64[dp]."""
        return starts_s(self.blocks, len(self.own)) + np.array([search.best().makespan_s for search in self.own])

    def score_key(self) -> tuple[int, float, float]:
        """Return memory beyond the limit, then the slowest replica, then all; smaller is better."""
        excess = max(search.best().excess_bytes for search in (*self.own, *self.blocks.values()))
        seconds = self.seconds()
        return excess, float(seconds.max()), float(seconds.sum())

    def choices(self) -> tuple[ReplicaChoice, ...]:
        # Phases are joined column by column, so all are priced with I and W where any runs them.
        used = [search for search in (*self.own, *self.blocks.values()) if len(search.documents)]
        split = bool(self.blocks) and any(search.ranking()[0].split for search in used)
        best = {id(search): ReplicaChoice(search.documents, search.build_best(split=split)) for search in used}
        if self.blocks:
            # The replicas of a block have to agree on its order, so it is fitted into host memory once for all of them;
            # where that takes longer, other policies may be faster.
            for key, one in best.items():
                ordered = ordered_within_host(self.own[0].problem, one, of_block=True)
                if ordered and ordered.candidate.makespan_s <= CLOSE * one.candidate.makespan_s:
                    best[key] = ordered
        choices = []
        for replica, own in enumerate(self.own):
            shared = [best[id(self.blocks[block])] for block in self.blocks_of(replica)]
            phases = [*shared, best[id(own)]] if len(own.documents) else shared
            idle = ReplicaChoice(own.documents, idle_candidate(own.problem)) if not phases else None
            choices.append(idle or (phases[0] if len(phases) == 1 else in_phases(own.problem, phases)))
        return tuple(choices)


def starts_s(blocks: dict[ReplicaBlock, ReplicaSearch], replicas: int) -> NDArray[np.float64]:
    """Return when the blocks of every replica end, one after the other; float64[replicas]."""
    ends_s = np.zeros(replicas)
    for block, search in blocks.items():
        ends_s[block.first : block.first + block.size] += search.best().makespan_s
    return ends_s


def even_out(result: SearchResult) -> None:
    """Move documents from the slowest replica to the fastest while that makes the slower of both faster."""
    for _ in range(MOST_MOVES * len(result.own)):
        seconds = result.seconds()
        slow, fast = int(seconds.argmax()), int(seconds.argmin())
        if seconds[slow] <= EVEN_REPLICAS * seconds.mean() or len(result.own[slow].documents) < 2:
            return
        # A document that fills half the gap; where memory makes that one too expensive, smaller ones.
        if not any(_move(result, slow, fast, (seconds[slow] - seconds[fast]) * share) for share in MOVED_SHARES):
            return


def _move(result: SearchResult, slow: int, fast: int, wanted_s: float) -> bool:
    """Move one document of about so many seconds, unless the slower of both replicas does not gain."""
    one, other = result.own[slow], result.own[fast]
    problem = one.problem
    busy_share = one.work_s / (problem.layout.pp * one.best().makespan_s)
    moved = int(np.abs(problem.document_s[one.documents] - wanted_s * problem.layout.pp * busy_share).argmin())
    trials = one.ranking()[:MOVED_TRIALS]
    lighter = one.over(np.delete(one.documents, moved))
    heavier = one.over(np.sort(np.append(other.documents, one.documents[moved])))
    score([(lighter, trials), (heavier, [*other.ranking()[:MOVED_TRIALS], *trials])])
    if not (has_trial(lighter) and has_trial(heavier)):
        return False
    starts = starts_s(result.blocks, len(result.own))[[slow, fast]].tolist()
    if _slower(starts, (lighter, heavier)) >= _slower(starts, (one, other)):
        return False
    result.own[slow], result.own[fast] = lighter, heavier
    return True


def _slower(starts: Sequence[float], searches: tuple[ReplicaSearch, ReplicaSearch]) -> tuple[int, float]:
    keys = [search.score_key(search.best()) for search in searches]
    return (
        max(excess for excess, _ in keys),
        max(start_s + seconds for start_s, (_, seconds) in zip(starts, keys, strict=True)),
    )


def search_step(
    problem: StepProblem,
    replicas: Sequence[NDArray[np.int64]],
    rules: SearchRules,
    blocks: dict[ReplicaBlock, ReplicaSearch] | None = None,
) -> SearchResult | None:
    """Search the best trials of documents assigned to replicas, behind `blocks` that were rated; None where no trial of
    theirs is possible."""
    result = SearchResult([rules.search(problem, documents) for documents in replicas], blocks or {})
    busy = [search for search in result.own if len(search.documents)]
    if not busy:
        return result
    if not rate_by_representative(busy, _heaviest_and_longest(busy), rules):
        return None
    if rules.even_out:
        even_out(result)
    # Last, because a replica that fits by a slow trial would give its documents away.
    if over := [search for search in result.own if search.best().excess_bytes]:
        score([(search, rules.fallback(search)) for search in over])
        if rules.even_out:
            even_out(result)
    return result


def search_merged(problem: StepProblem, merge: Merge, rules: SearchRules, pipeline_share: float) -> SearchResult | None:
    """Search as `search_step`, where blocks of replicas share some documents; replicas' own ones are assigned by the
    time that those leave of `pipeline_share`, the share of a pipeline's time that computes."""
    blocks = {block: rules.search(problem, documents, block.size) for block, documents in merge.blocks.items()}
    if not _rate_blocks(blocks, rules):
        return None
    load_s = starts_s(blocks, problem.layout.dp) * problem.layout.pp
    own = merge.deal_own(problem.document_s / pipeline_share, load_s)
    return search_step(problem, own, rules, blocks)


def _rate_blocks(blocks: dict[ReplicaBlock, ReplicaSearch], rules: SearchRules) -> bool:
    """Rate blocks, of one size by the one with most work; return whether all have a trial."""
    for size in dict.fromkeys(block.size for block in blocks):
        alike = [search for block, search in blocks.items() if block.size == size]
        if not rate_by_representative(alike, [heaviest(alike)], rules):
            return False
    return True


Estimate = tuple[int, float]  # Bytes beyond memory, seconds


def quick_trials(search: ReplicaSearch, rules: SearchRules) -> list[Trial]:
    """Return the first trials under the list schedule, which suffice to compare packs; all where none is under it."""
    first = rules.first(search)
    return [trial for trial in first if trial.order is Order.LIST] or first


def rate_merges(problem: StepProblem, merges: Sequence[Merge], rules: SearchRules) -> list[Estimate]:
    """Estimate memory beyond the limit and time of every merge; all trials in one go."""
    representatives = [_Representatives(problem, merge, rules) for merge in merges]
    searches = [search for one in representatives for search in one.searches()]
    score([(search, _few_trials(search, rules)) for search in searches])
    return [one.estimate() for one in representatives]


class _Representatives:
    """Search, of a merge, the block of each size with the most work, and the replica with the most work of its own."""

    def __init__(self, problem: StepProblem, merge: Merge, rules: SearchRules) -> None:
        self._problem, work_s = problem, problem.document_s
        self._block_s = {block: float(work_s[documents].sum()) for block, documents in merge.blocks.items()}
        self._shared: dict[int, tuple[float, ReplicaSearch]] = {}
        for size in dict.fromkeys(block.size for block in merge.blocks):
            block = max((one for one in merge.blocks if one.size == size), key=self._block_s.__getitem__)
            self._shared[size] = self._block_s[block], rules.search(problem, merge.blocks[block], size)
        own_s = [float(work_s[documents].sum()) for documents in merge.own]
        replica = max(range(len(own_s)), key=own_s.__getitem__)
        self._own = rules.search(problem, merge.own[replica])
        self._own_s = sum(own_s) / own_s[replica] if own_s[replica] else 0.0

    def searches(self) -> list[ReplicaSearch]:
        return [search for search in (*(one for _, one in self._shared.values()), self._own) if len(search.documents)]

    def estimate(self) -> Estimate:
        """Estimate blocks by their work; what replicas run alone fills up what sharing leaves uneven."""
        start_s = np.zeros(self._problem.layout.dp)
        for block, seconds in self._block_s.items():
            most_s, representative = self._shared[block.size]
            start_s[block.first : block.first + block.size] += representative.best().makespan_s * seconds / most_s
        excess = max(search.best().excess_bytes for search in self.searches())
        even_s = float(start_s.mean()) + self._own_s * self._own.best().makespan_s / len(start_s)
        return excess, max(float(start_s.max()), even_s)


def _few_trials(search: ReplicaSearch, rules: SearchRules) -> list[Trial]:
    trials, documents = quick_trials(search, rules), len(search.documents)
    if documents <= FEW_DOCUMENTS:
        return trials
    of_cut = {cut: [trial for trial in trials if trial.setting.cut == cut] for cut in CUTS}
    whole = of_cut["whole"]
    one_each = sum(trial.setting.num_packs < documents for trial in whole)
    whole = whole[max(0, one_each + 1 - FEW_WHOLE) : one_each + 1]
    if whole and documents >= ENOUGH_WHOLE * search.problem.layout.num_stages:
        return whole
    return [*of_cut["symmetric"][FEW_SLICED], *of_cut["asymmetric"][FEW_SLICED], *whole] or trials


class RankedPolicies(NamedTuple):
    """Hold policies by their estimate, the best first, how many of them are too close to decide, and those not
    estimated."""

    ranked: list[tuple[Estimate, StepProblem]]
    close: int
    others: list[StepProblem]


def rank_policies(problems: Sequence[StepProblem], rules_of: Callable[[StepProblem], SearchRules]) -> RankedPolicies:
    """Rank policies by their estimate, up to the first that fits and is as fast as without a memory limit: the list
    schedule fits almost any step by holding forwards back, so fitting alone decides nothing."""
    if len(problems) == 1 or not len(problems[0].num_tokens):
        return RankedPolicies([((0, 0.0), problem) for problem in problems], 1, [])
    if problems[0].cap_bytes is None:  # every other policy costs time to save memory
        return RankedPolicies([((0, 0.0), problems[0])], 1, [])
    # The same ways of sharing for all: policies move seconds, hardly which documents are long.
    outliers = merge_documents(problems[0]) if problems[0].shares_documents else None
    uneven = [outliers, *uniform_merges(problems[0], outliers)] if outliers else []
    boundless = replace(problems[0], cap_bytes=None)
    least_s = _estimate(boundless, rules_of(boundless), uneven)[0][1]
    merges = [*uneven, *(long_merges(problems[0]) if problems[0].shares_documents else [])]
    result: list[tuple[Estimate, int]] = []
    for index, problem in enumerate(problems):
        if result and (0, work_s(problem)) >= min(result)[0]:
            continue  # its work alone takes longer than another policy
        estimate, rated = _estimate(problem, rules_of(problem), merges)
        result.append((estimate, index))
        if not estimate[0] and estimate[1] <= CLOSE * least_s:
            break
        if not index and len(merges) > 2:
            # Large groups are best with everything stored, small ones with as little as can be.
            frugal = problems[-1]
            of_frugal = rate_merges(frugal, merges, rules_of(frugal))
            merges = [merges[at] for at in sorted({one.index(min(one)) for one in (rated, of_frugal)})]
    result.sort()
    (excess, seconds), _ = result[0]
    close = sum(estimate <= (excess, CLOSE * seconds) for estimate, _ in result[:MOST_CLOSE])
    ranked = {index for _, index in result}
    others = [problem for index, problem in enumerate(problems) if index not in ranked]
    return RankedPolicies([(estimate, problems[index]) for estimate, index in result], close, others)


def work_s(problem: StepProblem) -> float:
    """Return the seconds of all work of a step spread evenly over all pipelines."""
    return float(problem.document_s.sum()) / (problem.layout.dp * problem.layout.pipeline_ranks)


def _estimate(problem: StepProblem, rules: SearchRules, merges: list[Merge]) -> tuple[Estimate, list[Estimate]]:
    """Estimate memory beyond the limit and time of the heaviest replica, apart or with shared documents, the better;
    and of all merges."""
    assigned = assign_replicas(problem.document_s, problem.layout.dp)
    replicas = [rules.search(problem, documents) for documents in assigned if len(documents)]
    apart = _heaviest_and_longest(replicas)
    score([(search, quick_trials(search, rules)) for search in apart])
    best = [search.best() for search in apart]
    rated = rate_merges(problem, merges, rules)
    return min([(max(one.excess_bytes for one in best), max(one.makespan_s for one in best)), *rated]), rated
