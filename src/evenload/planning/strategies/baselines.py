"""Plan by strategies of windows and documents that other trainers use: `padded`, `sequential`, `best_fit`, `balanced`.

padded      consecutive documents in a batch padded to their longest, as a plain data loader with a padding collator
            does: a batch takes the next document while `(count + 1) · longest <= max_pack_tokens`. Batches go round
            robin to replicas, 1F1B. O(n).
sequential  documents one after the other, cut at the window, as common loaders do; but a piece is a slice whose
            attention sees its document from the start. Backward packs hold the same slices, documents in order and
            slices last-first, filled up to the window again. Replicas get consecutive documents, cut where the tokens
            are nearest to equal. 1F1B; the list schedule where that exceeds memory. O(n + windows).
best_fit    best-fit decreasing by tokens into windows of `max_pack_tokens` over the whole global batch, round robin to
            replicas, 1F1B; SlimPack's Megatron-LM baseline. It fills windows almost perfectly and ignores work. Smaller
            windows (`window_tokens`) are more micro-batches; a longer document is a pack of its own. O(n log n).
balanced    micro-batches of equal predicted time, with a token limit, 1F1B: what verl, slime and prime-rl do. Documents
            go to replicas by LPT on forward + backward time, then to micro-batches of their replica the same way; of a
            few multiples of pp as their number the fastest by simulation within memory is kept. `micro_batches` fixes
            the number: then the token limit binds first, and where LPT by time opens more, best fit by tokens packs.
            Where replicas wait for each other at every micro-batch, the search of `plan.micro_batches` divides all.
"""

from contextlib import nullcontext, suppress
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_pricing import pipeline_tasks
from evenload.errors import ConfigError, InfeasiblePlanError
from evenload.planning.micro_batches import Cost, micro_batches
from evenload.planning.packing import (
    WholePacks,
    assign_evenly,
    assign_in_turn,
    assign_replicas,
    best_fit_decreasing,
    longest_first,
    longest_first_within,
    pack_counts,
    run_packs,
)
from evenload.planning.problem import CHOOSE, Candidate, PlanOptions, ReplicaChoice, StepProblem, StrategyOptions
from evenload.planning.strategies.strategy import Strategy
from evenload.schedule.packflow import LIST
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.types.base import require_at_least_one
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.text import counted

ENOUGH_WORSE = 2
"""Larger numbers of micro-batches are not tried after so many in a row that were no better: fill and drain fall with
their number, constants rise with it."""


def plan_padded(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    batches = padded_batches(problem.num_tokens.tolist(), problem.window_tokens("padded"))
    return assign_in_turn(problem, batches, padded=True)


def padded_batches(num_tokens: list[int], max_pack_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = 0
    for index, tokens in enumerate(num_tokens):
        longest = max(longest, tokens)
        if batches and (len(batches[-1]) + 1) * longest <= max_pack_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = tokens
    return batches


PADDED = Strategy(
    name="padded",
    description="pads documents to the longest of their pack: a baseline, wastes compute",
    plan=plan_padded,
    ignores_memory=True,
)


Piece = tuple[int, int, int]  # (document, start, stop)


def plan_sequential(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    window = problem.options.max_pack_tokens
    if window is None:
        raise ConfigError("strategy sequential cuts at windows of max_pack_tokens; set it")
    return problem.effort.faster(
        ReplicaChoice(documents, _candidate(problem, documents, window))
        for documents in _consecutive(problem.num_tokens, problem.layout.dp)
    )


def sequential_packs(num_tokens: list[int], window: int) -> tuple[list[list[Piece]], list[list[Piece]]]:
    forward: list[list[Piece]] = []
    pieces: list[list[Piece]] = []  # by document
    left = 0
    for document, length in enumerate(num_tokens):
        start = 0
        pieces.append([])
        while start < length:
            if not left:
                forward.append([])
                left = window
            stop = min(length, start + left)
            pieces[-1].append((document, start, stop))
            forward[-1].append(pieces[-1][-1])
            left -= stop - start
            start = stop
    backward: list[list[Piece]] = []
    left = 0
    for own in pieces:
        for piece in reversed(own):
            size = piece[2] - piece[1]
            # Two slices of one document never share a pack: the later one's gradients must be there first.
            if size > left or backward[-1][-1][0] == piece[0]:
                backward.append([])
                left = window
            backward[-1].append(piece)
            left -= size
    return forward, backward


def _whole_windows(num_tokens: list[int], window: int) -> list[list[Piece]]:
    """Fill windows with consecutive documents that stay whole."""
    packs: list[list[Piece]] = []
    left = 0
    for document, length in enumerate(num_tokens):
        if length > left:
            packs.append([])
            left = window
        packs[-1].append((document, 0, length))
        left -= length
    return packs


def _consecutive(num_tokens: NDArray[np.int64], dp: int) -> list[NDArray[np.int64]]:
    """Split documents into runs, one a replica, at the document edge nearest to each share of the tokens."""
    edges = np.concatenate([[0], np.cumsum(num_tokens)])
    shares = edges[-1] * np.arange(1, dp) / dp
    borders = [0, *(int(np.abs(edges - share).argmin()) for share in shares), len(num_tokens)]
    return [np.arange(lo, hi, dtype=np.int64) for lo, hi in pairwise(borders)]


def _candidate(problem: StepProblem, documents: NDArray[np.int64], window: int) -> Candidate:
    lengths = problem.num_tokens[documents].tolist()
    may_cut = problem.costs.model.may_cut_documents
    pieces = sequential_packs(lengths, window) if may_cut else (_whole_windows(lengths, window),) * 2
    forward, backward = (SliceColumns.from_ranges(own, problem.layout.cp) for own in pieces)
    packs = problem.packs_of(documents, forward, backward)
    rules = (ONE_F_ONE_B, LIST) if problem.options.schedule == CHOOSE else (problem.options.rule(ONE_F_ONE_B),)
    tasks = pipeline_tasks(problem.costs, packs, split=rules[0].splits_backward)
    result: list[Candidate] = []
    for rule in rules:
        result.append(problem.scheduled(f"{forward.num_packs} windows", packs, rule, tasks))
        if not result[-1].excess_bytes:
            return result[-1]
    return min(result, key=Candidate.score)


SEQUENTIAL = Strategy(
    name="sequential",
    description="cuts the stream of documents at the window: a baseline",
    plan=plan_sequential,
    cuts_documents=True,
    ignores_memory=True,
    plans_trees=True,
)


class BestFitOptions(StrategyOptions, tag="best_fit"):
    """Set how large windows are.

    Args:
        window_tokens: of a window, at most `max_pack_tokens`; longer documents are packs of their own. None =
            `max_pack_tokens`.
    """

    window_tokens: int | None = None

    def __post_init__(self) -> None:
        require_at_least_one("plan options: best_fit.", self, "window_tokens")


def plan_best_fit(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    limit, window = problem.window_tokens("best_fit"), problem.options.own(BestFitOptions).window_tokens
    return assign_in_turn(problem, _windows(problem, limit if window is None else window))


def _require_windows(options: PlanOptions) -> None:
    limit, window = options.max_pack_tokens, options.own(BestFitOptions).window_tokens
    if window is not None and limit is not None and window > limit:
        raise ConfigError(
            f"plan options: best_fit.window_tokens is {window}, max_pack_tokens is {limit}; lower the former or raise "
            "the latter"
        )


def _windows(problem: StepProblem, window_tokens: int) -> list[list[int]]:
    """Fill windows, longest documents first; those that no window holds come first, alone."""
    tokens = problem.num_tokens
    longer = np.flatnonzero(tokens > window_tokens)
    if not len(longer):
        packs, enough = best_fit_decreasing(tokens, window_tokens), _all_packs(problem)
        if enough is None or len(packs) <= enough:
            return packs
        filled = WholePacks(enough, window_tokens)  # as whoever filled so many packs with just these documents
        return [pack for pack in filled.packs if pack] if all(map(filled.take, tokens.tolist())) else packs
    alone = longer[np.argsort(-tokens[longer], kind="stable")]
    others = np.flatnonzero(tokens <= window_tokens)
    packed = best_fit_decreasing(tokens[others], window_tokens)
    return [[int(at)] for at in alone] + [others[window].tolist() for window in packed]


def _all_packs(problem: StepProblem) -> int | None:
    """Return how many packs a fixed number of micro-batches is on all replicas; None = it is not fixed."""
    count = problem.options.micro_batches
    return None if count is None else count * problem.layout.dp


BEST_FIT = Strategy(
    name="best_fit",
    description="fills packs by tokens, whole documents: a baseline, packs of unequal work",
    plan=plan_best_fit,
    options=BestFitOptions,
    require_options=_require_windows,
    ignores_memory=True,
    plans_trees=True,
)


def plan_balanced(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    limit, enough = problem.options.max_pack_tokens, _all_packs(problem)
    if problem.waits_at_each:
        with nullcontext() if enough is None else suppress(InfeasiblePlanError):
            return run_packs(problem, _even_at_every_index(problem))
    replicas = _replicas_with_room(problem) or assign_replicas(problem.document_s, problem.layout.dp)
    one_by_one = (ReplicaChoice(documents, _best(problem, documents)) for documents in replicas)
    if enough is None or limit is None or problem.layout.has_replicated_stages:
        return problem.effort.faster(one_by_one)
    choices = tuple(one_by_one)
    most = max(choice.candidate.packs.forward.num_packs for choice in choices) * len(choices)
    if most <= enough:
        return choices
    tight = _windows(problem, limit)  # equal times leave too much room in full packs
    return assign_evenly(problem, tight) if len(tight) <= enough else choices


def _even_at_every_index(problem: StepProblem) -> list[list[list[int]]]:
    """Return the micro-batches of every replica, whose first ones take equally long, then their second ones."""
    options, layout = problem.options, problem.layout
    made = micro_batches(
        problem.num_tokens,
        layout.dp,
        options.max_pack_tokens,
        work_s=problem.document_s,
        cost=Cost(micro_batch_s=problem.costs.pack_constant_s),
        count=options.micro_batches,
        count_multiple=1 if options.micro_batches else layout.pp,
    )
    return [[documents for documents in rank if documents] for rank in made.ranks]


def _replicas_with_room(problem: StepProblem) -> list[NDArray[np.int64]] | None:
    """Assign as `assign_replicas`, with no more tokens each than a fixed number of micro-batches holds; None = no such
    number."""
    options, dp = problem.options, problem.layout.dp
    if options.micro_batches is None or options.max_pack_tokens is None:
        return None
    capacity = options.micro_batches * options.max_pack_tokens
    groups = longest_first(problem.document_s, dp, num_tokens=problem.num_tokens, capacity=capacity)
    return [np.sort(np.array(group, dtype=np.int64)) for group in groups] if len(groups) <= dp else None


def _best(problem: StepProblem, documents: NDArray[np.int64]) -> Candidate:
    options, pp = problem.options, problem.layout.pipeline_ranks
    rule, num_tokens, work_s = options.rule(ONE_F_ONE_B), problem.num_tokens[documents], problem.document_s[documents]
    result: list[Candidate] = []
    worse = 0
    counts = pack_counts(int(num_tokens.sum()), pp, options.candidates, options.max_pack_tokens)
    if options.micro_batches is not None:
        counts = [options.micro_batches]
    for count in counts:
        if result and count > len(documents):
            break  # more micro-batches than documents change nothing
        groups = longest_first_within(work_s, count, pp, num_tokens, options.max_pack_tokens)
        groups = [group for group in groups if group]
        if options.micro_batches is not None and options.max_pack_tokens is not None and len(groups) > count:
            tight = best_fit_decreasing(num_tokens, options.max_pack_tokens)
            groups = min(groups, tight, key=len)
        columns = whole_document_columns(groups, num_tokens, problem.layout.cp)
        tried = problem.scheduled(counted(len(groups), "pack"), problem.packs_of(documents, columns), rule)
        worse = worse + 1 if result and min(result, key=Candidate.score).score() <= tried.score() else 0
        result.append(tried)
        if worse == ENOUGH_WORSE:
            break
    return min(result, key=Candidate.score)


BALANCED = Strategy(
    name="balanced",
    description="whole documents, packs of equal predicted seconds",
    plan=plan_balanced,
    ignores_memory=True,
    runs_replicated_stages=True,
    plans_trees=True,
)
