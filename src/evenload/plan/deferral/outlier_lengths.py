"""The lengths `L_1 < L_2 < …` from which `wlb` treats documents as outliers, tuned on a sample (WLB §4.2).

Low thresholds balance better and delay more tokens. The tuning draws global batches from a sample of lengths, runs
the queues over them and keeps the thresholds of least imbalance `max · N / total` (WLB Table 2) among those whose
mean token delay is at most `TARGET_DELAY_STEPS`. Candidates are the lengths that leave certain shares of the tokens
above them; one that is above every document (no delay) is always among them, so there is always an answer.

Documents far smaller than a micro-batch act like water: they fill the least loaded micro-batches up to a common
level. So only documents above a hundredth of the mean micro-batch are placed one by one, and the token limit is not
looked at: about 2 ms per candidate and 32 micro-batches. Deterministic: the draws have a fixed seed.
"""

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

TARGET_DELAY_STEPS = 0.45
"""Mean token delay that thresholds may cost; WLB §7.4 reports 0.5."""
SAMPLE_LENGTHS = 8192
"""Lengths that make the last tuning; a document in a thousand is then still seen 8 times."""
TOKEN_SHARES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
"""Shares of all tokens that candidate thresholds leave in longer documents."""
TUNING_STEPS, WARM_UP_STEPS = 40, 8
"""Batches sampled for a candidate; the first ones, whose queues start empty, count for delay only."""
WATER_SHARE = 0.01
"""Of the mean micro-batch; smaller documents are not placed one by one."""


def queue_of(num_tokens: NDArray[np.int64], outlier_lengths: tuple[int, ...]) -> NDArray[np.int64]:
    """int64[n]: the queue `i` with `L_i <= length < L_{i+1}` from 0, or -1 for documents that are no outliers."""
    return np.searchsorted(np.array(outlier_lengths, np.int64), num_tokens, side="right").astype(np.int64) - 1


def grow_sample(sample: tuple[int, ...], new: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first `SAMPLE_LENGTHS` lengths seen."""
    return np.concatenate([np.array(sample, np.int64), new])[:SAMPLE_LENGTHS]


def should_tune(num_batches: int, num_sampled: int) -> bool:
    """With batches 1, 2, 4, 8, … and when the sample is complete."""
    return (num_batches + 1).bit_count() == 1 or num_sampled == SAMPLE_LENGTHS


def tune_outlier_lengths(
    lengths: NDArray[np.int64],
    work_s: NDArray[np.float64],
    *,
    num_documents: int,
    num_micro_batches: int,
    num_queues: int,
    max_delay_steps: int,
    seed: int = 0,
) -> tuple[int, ...]:
    """Thresholds for `num_queues` queues; fewer where fewer serve better.

    Args:
        lengths: int64[n], the sample; work_s: float64[n], seconds of each.
        num_documents: of a global batch.
        num_micro_batches: N of Algorithm 1.
    """
    draws = np.random.default_rng(seed).integers(0, len(lengths), (TUNING_STEPS, num_documents))
    levels = _candidate_lengths(lengths)
    best: tuple[float, float, tuple[int, ...]] | None = None
    for size in range(num_queues + 1):
        for chosen in itertools.combinations(levels, size):
            imbalance, delay = simulate_queues(
                lengths[draws], work_s[draws], chosen, num_micro_batches, max_delay_steps
            )
            if delay <= TARGET_DELAY_STEPS and (best is None or (imbalance, delay, chosen) < best):
                best = (imbalance, delay, chosen)
    assert best is not None  # no threshold, no delay
    return best[2]


def simulate_queues(
    lengths: NDArray[np.int64],
    work_s: NDArray[np.float64],
    outlier_lengths: tuple[int, ...],
    num_micro_batches: int,
    max_delay_steps: int,
) -> tuple[float, float]:
    """Run Algorithm 1 over batches; without token limit, short documents as water.

    Args:
        lengths: int64[steps, documents]; work_s: float64[steps, documents].

    Returns:
        Mean imbalance degree `max · N / total` after the warm-up, and mean token delay in steps.
    """
    steps, n = len(lengths), num_micro_batches
    water = WATER_SHARE * float(work_s.sum()) / (steps * n)
    held_work, held_since, held_tokens = np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64)
    degrees: list[float] = []
    late = 0
    for step in range(steps):
        work = np.concatenate([held_work, work_s[step]])
        since = np.concatenate([held_since, np.full(lengths.shape[1], step)])
        tokens = np.concatenate([held_tokens, lengths[step]])
        queue = queue_of(tokens, outlier_lengths)
        due = due_documents(work, step - since, queue, n, max_delay_steps)
        late += int(((step - since) * tokens)[due].sum())
        held_work, held_since, held_tokens = work[~due], since[~due], tokens[~due]
        if step >= WARM_UP_STEPS:
            degrees.append(_degree(work[due], n, water))
    late += int(((steps - held_since) * held_tokens).sum())
    return float(np.mean(degrees)), late / float(lengths.sum())


def due_documents(
    work_s: NDArray[np.float64],
    age_steps: NDArray[np.int64],
    queue: NDArray[np.int64],
    num_micro_batches: int,
    max_delay_steps: int,
) -> NDArray[np.bool_]:
    """Which documents a step trains: bool[n].

    All that are in no queue, floor(len / N)·N of every queue, all overdue, and free riders: waiting documents that
    make no micro-batch the longest, because one is as long anyway. O(n log n).

    Args:
        work_s, age_steps, queue: of all documents at hand, oldest first; queue -1 = none.
    """
    n = num_micro_batches
    due = (queue < 0) | (age_steps >= max_delay_steps)
    for level in range(int(queue.max(initial=-1)) + 1):
        members = np.flatnonzero(queue == level)
        due[members[: len(members) // n * n]] = True
    waiting = np.flatnonzero(~due)
    if not len(waiting):
        return due
    if not due.any():
        due[waiting[:n]] = True  # a step never trains nothing
        waiting = waiting[n:]
    total = float(work_s[due].sum())
    smallest = float(work_s[waiting].min(initial=np.inf))
    # Documents below the waiting ones are water: they go where room is left.
    loads = _longest_first_loads(work_s[due & (work_s > smallest / 4)], n)
    longest = max(loads)
    for index, work in zip(waiting.tolist(), work_s[waiting].tolist(), strict=True):
        if loads[0] + work <= max(longest, (total + work) / n):
            longest = max(longest, loads[0] + work)
            heapq.heapreplace(loads, loads[0] + work)
            total += work
            due[index] = True
    return due


def _degree(work_s: NDArray[np.float64], num_groups: int, water: float) -> float:
    total = float(work_s.sum())
    if total <= 0:
        return 1.0
    longest = max(_longest_first_loads(work_s[work_s > water], num_groups))
    return max(longest, total / num_groups) * num_groups / total


def _longest_first_loads(work_s: NDArray[np.float64], num_groups: int) -> list[float]:
    """Heap of the loads that `bin_packing.longest_first` leads to."""
    loads = [0.0] * num_groups
    for work in np.sort(work_s)[::-1].tolist():
        heapq.heapreplace(loads, loads[0] + work)
    return loads


def _candidate_lengths(lengths: NDArray[np.int64]) -> list[int]:
    """Distinct lengths with about `TOKEN_SHARES` of the tokens in documents at least as long; ascending."""
    descending = np.sort(lengths)[::-1]
    above = np.cumsum(descending) / float(descending.sum())
    at = np.minimum(np.searchsorted(above, TOKEN_SHARES), len(descending) - 1)
    return sorted({int(descending[index]) for index in at})
