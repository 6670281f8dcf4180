"""`wlb`: variable-length packing with outlier queues across steps (WLB §4, Algorithm 1).

    new batch ─► length in [L_i, L_{i+1})  ─► queue i ─► N at a time ─┐
              └► shorter ────────────────────────────────────────────┼─► greedy packing into N micro-batches
    left over from the last step ────────────────────────────────────┘        │
                                                      does not fit ◄──────────┘ left over, first next step

Greedy: left-over documents first, then longest first; each into the micro-batch with the least predicted time
W_a + W_l, if that would exceed S_max = `max_pack_tokens` into the one with the fewest tokens, else it is left over.
A queue gives N documents at a time so that every micro-batch gets one outlier. O(n log N) per step.

N = dp·`micro_batches`, by default the least multiple of dp·pp whose tokens fit S_max; then the documents chosen are
also packed into 2N and 4N micro-batches and the fastest by estimate that fits memory is kept: a pipeline often wants
more micro-batches than the paper's pp. Without a state (a step planned alone) nothing is put off.

Right readings where the printed algorithm fails (oracle §5): a document fits when the sum is `<= S_max`, not `<`;
a queue gives floor(len / N)·N, not N, or it grows for ever; left-over documents are sorted too; all queues are
flushed at the end of the data. Ours: a document that would wait longer than `max_delay_steps` is trained now, and
for it, or at the end, N grows by dp·pp until everything due fits, so nothing starves and no limit breaks; a step
never trains nothing while documents wait. A waiting document that makes no micro-batch the longest, because one is
as long anyway, rides free: that lowers imbalance and delay together. The
thresholds L_i are tuned in `plan.outlier_lengths`.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.plan.deal import deal_evenly
from evenload.plan.delay import Arrivals, DelayedChoice
from evenload.plan.outlier_lengths import (
    SAMPLE_LENGTHS,
    due_documents,
    grow_sample,
    queue_of,
    should_tune,
    tune_outlier_lengths,
)
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.plan.var_length import pack_greedily
from evenload.types.columns import whole_document_columns

MORE_MICRO_BATCHES = (2, 4)
"""Multiples of N that are tried too."""


def plan_wlb(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """One choice per replica, of this batch alone: nothing is put off.

    Raises:
        DataError: a document longer than `max_pack_tokens`.
    """
    problem.require_whole_documents_fit("wlb")
    everything = np.arange(len(problem.num_tokens))
    groups, _ = _pack(problem, everything, everything, _base_count(problem, problem.num_tokens))
    return _fastest(problem, groups)


def delay_wlb(problem: StepProblem, arrivals: Arrivals) -> DelayedChoice:
    """One step of Algorithm 1.

    Raises:
        DataError: a document longer than `max_pack_tokens`.
    """
    problem.require_whole_documents_fit("wlb")
    num_tokens, is_new = problem.num_tokens, arrivals.is_new
    count = _base_count(problem, num_tokens[is_new] if is_new.any() else num_tokens)
    lengths, sample = _thresholds(problem, arrivals, count)
    if arrivals.is_last:
        due = np.arange(len(num_tokens))
        must = due
    else:
        queue = np.where(arrivals.is_left_over, -1, queue_of(num_tokens, lengths))
        must = np.flatnonzero(arrivals.age_steps() >= problem.options.max_delay_steps)
        oldest_first = np.lexsort((problem.doc_ids, arrivals.since_step))
        chosen = due_documents(
            problem.document_s[oldest_first],
            arrivals.age_steps()[oldest_first],
            queue[oldest_first],
            count,
            problem.options.max_delay_steps,
        )
        due = np.sort(oldest_first[chosen])
    # Left-over and overdue documents first, then the longest, as the greedy packing wants them.
    first = arrivals.is_left_over | np.isin(np.arange(len(num_tokens)), must)
    order = due[np.lexsort((due, -problem.document_s[due], ~first[due]))]
    groups, left_over = _pack(problem, order, must, count)
    return DelayedChoice(_fastest(problem, groups), frozenset(left_over), lengths, sample)


def _base_count(problem: StepProblem, num_tokens: NDArray[np.int64]) -> int:
    """N: micro-batches of all replicas."""
    options, layout = problem.options, problem.layout
    if options.micro_batches is not None:
        return options.micro_batches * layout.dp
    capacity, unit = options.max_pack_tokens, layout.dp * layout.pp
    return unit if capacity is None else max(1, -(-int(num_tokens.sum()) // (capacity * unit))) * unit


def _thresholds(problem: StepProblem, arrivals: Arrivals, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """L_i and the sample for the next tuning."""
    options, state = problem.options, arrivals.state
    if options.outlier_lengths is not None:
        return options.outlier_lengths, ()
    new = problem.num_tokens[arrivals.is_new]
    if not len(new) or (state.num_batches and not state.sample):
        return state.outlier_lengths, state.sample  # nothing learnt, or tuned for good
    sample = grow_sample(state.sample, new)
    lengths = state.outlier_lengths
    if should_tune(state.num_batches, len(sample)):
        lengths = tune_outlier_lengths(
            sample,
            problem.costs.document_seconds(sample),
            num_documents=len(new),
            num_micro_batches=count,
            num_queues=options.outlier_queues,
            max_delay_steps=options.max_delay_steps,
        )
    return lengths, tuple(sample.tolist()) if len(sample) < SAMPLE_LENGTHS else ()


def _pack(
    problem: StepProblem, order: NDArray[np.int64], must: NDArray[np.int64], count: int
) -> tuple[list[list[int]], list[int]]:
    """Groups and left-over documents; more than `count` groups where documents that must be trained need them."""
    unit = problem.layout.dp * problem.layout.pp
    required = set(must.tolist())
    if len(required) == len(order):
        order = order[np.lexsort((order, -problem.document_s[order]))]
    while True:
        groups, left_over = pack_greedily(
            problem.document_s, problem.num_tokens, order, count, problem.options.max_pack_tokens
        )
        if required.isdisjoint(left_over):
            return groups, left_over
        count = (count // unit + 1) * unit


def _fastest(problem: StepProblem, groups: list[list[int]]) -> tuple[ReplicaChoice, ...]:
    """The groups, or the same documents in more of them: the least by estimate that fits memory."""
    documents = np.array([index for group in groups for index in group], np.int64)
    order = documents[np.lexsort((documents, -problem.document_s[documents]))]
    tried = [groups]
    for factor in MORE_MICRO_BATCHES[: problem.options.candidates - 1]:
        if problem.options.micro_batches is not None or factor * len(groups) > 2 * len(documents):
            break  # the user's number, or packs of single documents
        more, left_over = pack_greedily(
            problem.document_s, problem.num_tokens, order, factor * len(groups), problem.options.max_pack_tokens
        )
        if not left_over:
            tried.append(more)
    found: list[tuple[ReplicaChoice, ...]] = []
    for one in sorted(tried, key=lambda groups: _estimate_s(problem, groups)):
        found.append(deal_evenly(problem, one))
        if not any(choice.candidate.excess_bytes for choice in found[-1]):
            return found[-1]
    return min(found, key=lambda choices: max(choice.candidate.score() for choice in choices))


def _estimate_s(problem: StepProblem, groups: list[list[int]]) -> float:
    """1F1B in closed form: a replica's micro-batches one after the other; longest first, so the pipeline fills with
    the longest forward and drains with the shortest backward."""
    columns = whole_document_columns([group for group in groups if group], problem.num_tokens)
    if not columns.num_packs:
        return 0.0
    forward, backward = (
        problem.costs.pack_seconds(columns, direction, problem.policy) for direction in ("forward", "backward")
    )
    busy_s = float((forward + backward).max(axis=1).sum()) / problem.layout.dp
    return busy_s + (problem.layout.pp - 1) * float(forward.max() + backward.max(axis=1).min())
