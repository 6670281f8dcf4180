"""Plan by `wlb`: variable-length packing with outliers that wait across steps (WLB §4, Algorithm 1).

    new batch ─► short documents ───────────────────────────────────────┐
              └► outliers wait ─► as many as leave the step balanced ───┼─► greedy packing into N micro-batches
    left over from the last step ───────────────────────────────────────┘        │
                                                         does not fit ◄──────────┘ left over, first next step

Greedy (`packing.pack_greedily`): left-over documents first, then longest first. Which outliers are trained is decided
by `plan.deferral`: balanced release (ours), or the paper's queues: length in [L_i, L_{i+1}) ─► queue i ─► N at a time.
N = dp·`micro_batches`, by default the least multiple of dp·pp whose tokens fit `max_pack_tokens`; then also 2N and 4N
micro-batches are tried, of which the fastest by simulation within memory is kept.

Right readings where the printed algorithm fails: a document fits when the sum is `<= S_max`, not `<`; a queue gives
floor(len / N)·N, not N, or it grows for ever; left-over documents are sorted too; all queues are flushed at the end of
the data. Ours: a document that would wait longer than `max_delay_steps` is trained now, and for it, or at the end, N
grows until everything due fits; a step always trains something while documents wait.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.planning.activation_policy import worst_score
from evenload.planning.deferral import (
    SAMPLE_LENGTHS,
    Arrivals,
    AtHand,
    DelayedChoice,
    due_documents,
    queue_of,
    release_balanced,
    tune_outlier_lengths,
)
from evenload.planning.packing import LEFT_OVER, assign_evenly, members_of, pack_greedily
from evenload.planning.problem import ReplicaChoice, SlowerPlanError, StepProblem, StrategyOptions
from evenload.planning.strategies.strategy import Strategy
from evenload.types.base import require_at_least_one

MORE_MICRO_BATCHES = (2, 4)  # Multiples of N that are tried too
PUBLISHED_NOTE = "as published: Algorithm 1's queues, one number of micro-batches"
# Where these are tried and there is a pipeline, outliers wait until so many times dp·pp micro-batches are balanced,
# because a pipeline waits for its longest micro-batch at both ends (4-10 % of the step in WLB's Table 1 settings).
_PIPELINE_FACTOR = 2


class WlbOptions(StrategyOptions, tag="wlb"):
    """Set which outliers wait.

    Args:
        as_published: WLB's Algorithm 1: its queues, and N micro-batches alone (with the readings above that keep it
            from growing or starving).
        release: which of the documents that wait are trained: as many as leave the step balanced ("balance"), or one
            for every micro-batch whenever a queue holds so many ("queues", as WLB's Algorithm 1).
        outlier_queues: most queues with release "queues".
        outlier_lengths: the thresholds, ascending; documents below the first never wait. None = tuned on the lengths
            of the first batches for "queues", no threshold for "balance".
    """

    as_published: bool = False
    release: Literal["balance", "queues"] = "balance"
    outlier_queues: int = 2
    outlier_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_at_least_one("plan options: wlb.", self, "outlier_queues")
        lengths = self.outlier_lengths or ()
        if any(length < 1 for length in lengths) or sorted(set(lengths)) != list(lengths):
            raise ConfigError(f"plan options: wlb.outlier_lengths {list(lengths)} must ascend and be at least 1")


def plan_wlb(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    problem = _as_configured(problem)
    count, everything = _base_count(problem, problem.num_tokens), np.arange(len(problem.num_tokens))
    return _fastest(problem, *_pack(problem, everything, everything >= 0, count))


def delay_wlb(problem: StepProblem, arrivals: Arrivals) -> DelayedChoice:
    problem = _as_configured(problem)
    num_tokens, is_new, state = problem.num_tokens, arrivals.is_new, arrivals.state
    count = _base_count(problem, num_tokens[is_new] if is_new.any() else num_tokens)
    lengths, sample = state.outlier_lengths, state.sample
    by_queues = problem.options.own(WlbOptions).release == "queues"
    if by_queues:
        lengths, sample = _thresholds(problem, arrivals, count)
    must = overdue = arrivals.age_steps() >= problem.options.max_delay_steps
    if arrivals.is_last:
        due = must = np.ones(len(num_tokens), bool)
    elif by_queues:
        due = _due_by_queues(problem, arrivals, lengths, count)
    else:
        due = _due_by_balance(problem, arrivals, overdue, count)
    # Left-over and overdue documents first, then the longest, as the greedy packing wants them.
    order = _longest_first(problem, np.flatnonzero(due))
    if not arrivals.is_last:
        first = (arrivals.is_left_over | overdue)[order]
        order = np.concatenate([order[first], order[~first]])
    order, group_of, count = _pack(problem, order, must, count)
    left_over = frozenset(order[group_of == LEFT_OVER].tolist())
    return DelayedChoice(_fastest(problem, order, group_of, count), left_over, lengths, sample)


def _as_configured(problem: StepProblem) -> StepProblem:
    own = problem.options.own(WlbOptions)
    if not own.as_published:
        return problem
    options = msgspec.structs.replace(problem.options, candidates=1)
    return replace(problem, options=options.with_own(msgspec.structs.replace(own, release="queues")))


def _longest_first(problem: StepProblem, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    return documents[np.lexsort((documents, -problem.document_s[documents]))]


def _base_count(problem: StepProblem, num_tokens: NDArray[np.int64]) -> int:
    options, layout = problem.options, problem.layout
    if options.micro_batches is not None:
        return options.micro_batches * layout.dp
    capacity, unit = options.max_pack_tokens, layout.dp * layout.pp
    return unit if capacity is None else max(1, -(-int(num_tokens.sum()) // (capacity * unit))) * unit


def _due_by_balance(
    problem: StepProblem, arrivals: Arrivals, overdue: NDArray[np.bool_], count: int
) -> NDArray[np.bool_]:
    options, layout = problem.options, problem.layout
    if options.micro_batches is None and options.candidates > 1 and layout.pp > 1:
        count = _PIPELINE_FACTOR * layout.dp * layout.pp
    shortest = (options.own(WlbOptions).outlier_lengths or (1,))[0]
    hand = AtHand(
        work_s=problem.document_s,
        age_steps=arrivals.age_steps(),
        must=overdue | arrivals.is_left_over,
        may_wait=problem.num_tokens >= shortest,
        new_work_s=float(problem.document_s[arrivals.is_new].sum()),
        num_micro_batches=count,
        max_delay_steps=options.max_delay_steps,
        recent_delay_steps=arrivals.state.recent_delay_steps(),
    )
    return release_balanced(hand)


def _due_by_queues(problem: StepProblem, arrivals: Arrivals, lengths: tuple[int, ...], count: int) -> NDArray[np.bool_]:
    queue = np.where(arrivals.is_left_over, -1, queue_of(problem.num_tokens, lengths))
    oldest_first = np.lexsort((problem.doc_ids, arrivals.since_step))
    due = np.zeros(len(queue), bool)
    due[oldest_first] = due_documents(
        problem.document_s[oldest_first],
        arrivals.age_steps()[oldest_first],
        queue[oldest_first],
        count,
        problem.options.max_delay_steps,
    )
    return due


def _thresholds(problem: StepProblem, arrivals: Arrivals, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    own, state = problem.options.own(WlbOptions), arrivals.state
    if own.outlier_lengths is not None:
        return own.outlier_lengths, ()
    new = problem.num_tokens[arrivals.is_new]
    if not len(new) or (state.num_batches and not state.sample):
        return state.outlier_lengths, state.sample  # nothing learnt, or tuned for good
    sample = np.concatenate([np.array(state.sample, np.int64), new])[:SAMPLE_LENGTHS]
    lengths = state.outlier_lengths
    # With batches 1, 2, 4, 8, … and when the sample is complete.
    if (state.num_batches + 1).bit_count() == 1 or len(sample) == SAMPLE_LENGTHS:
        lengths = tune_outlier_lengths(
            sample,
            problem.costs.document_seconds(sample),
            num_documents=len(new),
            num_micro_batches=count,
            num_queues=own.outlier_queues,
            max_delay_steps=problem.options.max_delay_steps,
        )
    return lengths, tuple(sample.tolist()) if len(sample) < SAMPLE_LENGTHS else ()


def _pack(
    problem: StepProblem, order: NDArray[np.int64], must: NDArray[np.bool_], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return documents in the order placed, the group of each, and the number of groups: more than `count` where
    documents that must be trained need more."""
    unit, limit = problem.layout.dp * problem.layout.pp, problem.options.max_pack_tokens
    if must[order].all():
        order = _longest_first(problem, order)
    sizes, work_s = problem.num_tokens[order], problem.document_s[order]
    while True:
        group_of = pack_greedily(work_s, sizes, count, limit)
        missing = must[order] & (group_of == LEFT_OVER)
        if limit is None or not missing.any():
            return order, group_of, count
        # As many more as the missing tokens fill, so a large batch needs few rounds.
        count = (count // unit + max(1, int(sizes[missing].sum()) // (limit * unit))) * unit


def _fastest(
    problem: StepProblem, order: NDArray[np.int64], group_of: NDArray[np.int64], count: int
) -> tuple[ReplicaChoice, ...]:
    """Choose between the groups and the same documents in more of them: within memory, the fastest by simulation."""
    tried = [members_of(group_of, order, count)]
    documents = _longest_first(problem, order[group_of != LEFT_OVER])
    sizes, work_s = problem.num_tokens[documents], problem.document_s[documents]
    for factor in MORE_MICRO_BATCHES[: problem.options.candidates - 1]:
        if problem.options.micro_batches is not None or factor * count > 2 * len(documents):
            break  # the user's number, or packs of single documents
        more = pack_greedily(work_s, sizes, factor * count, problem.options.max_pack_tokens)
        if not (more == LEFT_OVER).any():
            tried.append(members_of(more, documents, factor * count))
    note = PUBLISHED_NOTE if problem.options.own(WlbOptions).as_published else ""
    plans: list[tuple[ReplicaChoice, ...]] = []
    for groups in tried:
        with suppress(SlowerPlanError):
            plans.append(assign_evenly(problem, groups, note))
    if not plans:
        raise SlowerPlanError("a better plan is known")
    return min(plans, key=worst_score)


WLB = Strategy(
    name="wlb",
    description="packs of equal work; outliers wait for later steps, so the order of the data changes "
    "(ledger: deferred)",
    plan=plan_wlb,
    delay=delay_wlb,
    options=WlbOptions,
    ignores_memory=True,
)
