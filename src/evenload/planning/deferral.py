"""Defer documents to later steps: the state between steps, and which documents a step of `wlb` trains.

`wlb` and the `fixed_*` strategies with a window of several batches defer documents; those come back with the next batch
and are trained within `max_delay_steps`. The state between steps is small, serialisable, and holds no tokens.

**Balanced release** (ours): of all documents at hand the fewest longest ones wait at which the degree max·N / total of
the others is within a limit, else as many as give the least degree; so documents of any length gather until they fill N
micro-batches together. The limit is looser beyond a recent delay of `EASY_DELAY_STEPS`, so delay settles near half a
step. For a document too rare to gather company, which is trained at `max_delay_steps` anyway, the steps before save up
to `RESERVE_SHARE` of a batch's work each. Degrees are estimated for all numbers at once from sums, a few are then
packed. O(n log n).

**Queues** (WLB §4.2, Algorithm 1): the lengths `L_1 < L_2 < …` from which documents are outliers, tuned on a sample of
lengths: of candidates that leave certain shares of the tokens above them, simulated over drawn batches, those of least
imbalance (WLB Table 2) whose mean token delay is at most `TARGET_DELAY_STEPS`. About 2 ms per candidate and 32
micro-batches; draws have a fixed seed.
"""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.errors import DataError
from evenload.planning.packing import pack_greedily
from evenload.planning.problem import ReplicaChoice
from evenload.types.base import Frozen

FADE = 31 / 32  # Weight of a step in the recent delay, each step later
TIGHT_DEGREE = 1.03  # Degree within which a step counts as even, while delay is small
EASY_DELAY_STEPS = 0.42  # Recent mean token delay up to which the limit stays tight
# Recent mean token delay from which every step counts as even: nothing waits (WLB §7.4 reports half a step).
MOST_DELAY_STEPS = 0.5
# By how much the limit grows per step of delay beyond `EASY_DELAY_STEPS`; ever more towards `MOST_DELAY_STEPS`.
LOOSER_PER_STEP = 3.0
RESERVE_SHARE = 0.2  # Of a batch's work: saved a step for a document that cannot be balanced otherwise
PLACES_TRIED = 8  # Places whose degree is computed by packing: of those that may be even, and of all if none is
WAITING_PER_MICRO_BATCH = 6  # Most documents that wait, in micro-batches: beyond, a step would train next to nothing
TARGET_DELAY_STEPS = 0.45  # Mean token delay that thresholds may cost; WLB §7.4 reports 0.5
SAMPLE_LENGTHS = 8192  # Lengths that make the last tuning; a document in a thousand is then still seen 8 times
# Shares of all tokens that candidate thresholds leave in longer documents.
TOKEN_SHARES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
FILLER_SHARE = 0.01  # Of the mean micro-batch; smaller documents are not placed one by one
TUNING_STEPS, WARM_UP_STEPS = 40, 8  # Batches sampled for a candidate; the first ones count for delay only


class Waiting(Frozen):
    """Name a deferred document and the step with whose batch it came; left over = it was due but did not fit."""

    doc_id: int
    since_step: int
    is_left_over: bool = False


class DelayState(Frozen):
    """Hold everything between two steps.

    Args:
        waiting: documents that were deferred, oldest first.
        outlier_lengths, sample: `wlb`'s thresholds as tuned so far, and lengths seen until there are enough to tune.
        waited_tokens, arrived_tokens: deferred, once for every step, and come; older steps fade by `FADE`.
    """

    waiting: tuple[Waiting, ...] = ()
    outlier_lengths: tuple[int, ...] = ()
    sample: tuple[int, ...] = ()
    num_batches: int = 0
    waited_tokens: float = 0.0
    arrived_tokens: float = 0.0

    def recent_delay_steps(self) -> float:
        """Return the mean token delay of the recent steps, by Little's law; 0 before the first."""
        return self.waited_tokens / self.arrived_tokens if self.arrived_tokens else 0.0


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Hold when the documents of a problem came: `since_step` int64[n] is the step with whose batch each came; with the
    last batch (`is_last`) nothing may be deferred."""

    step: int
    since_step: NDArray[np.int64]
    is_left_over: NDArray[np.bool_]
    is_last: bool
    state: DelayState

    @property
    def is_new(self) -> NDArray[np.bool_]:
        return self.since_step == self.step

    def age_steps(self) -> NDArray[np.int64]:
        return self.step - self.since_step


@dataclass(frozen=True, eq=False)
class DelayedChoice:
    """Hold the result of a strategy; documents in none of the choices are deferred. `left_over` are indices of
    documents that were due and did not fit; `outlier_lengths` and `sample` are for the next state."""

    choices: tuple[ReplicaChoice, ...]
    left_over: frozenset[int] = frozenset()
    outlier_lengths: tuple[int, ...] = ()
    sample: tuple[int, ...] = ()


def arrivals_of(step: int, doc_ids: NDArray[np.int64], state: DelayState, is_last: bool) -> Arrivals:
    """Match a batch with the state; raise `DataError` where a document that was deferred did not come back."""
    waiting = {one.doc_id: one for one in state.waiting}
    if lost := sorted(waiting.keys() - set(doc_ids.tolist())):
        raise DataError(
            f"step {step}: documents {lost[:5]} were deferred by an earlier step and are not in the batch; plan the "
            "batch's new documents together with those carried over"
        )
    since = [waiting[doc_id].since_step if doc_id in waiting else step for doc_id in doc_ids.tolist()]
    left_over = [doc_id in waiting and waiting[doc_id].is_left_over for doc_id in doc_ids.tolist()]
    return Arrivals(step, np.array(since, np.int64), np.array(left_over, bool), is_last, state)


def trained_documents(choices: Iterable[ReplicaChoice]) -> NDArray[np.int64]:
    return np.sort(np.concatenate([choice.documents for choice in choices]))


def state_after(
    arrivals: Arrivals, doc_ids: NDArray[np.int64], num_tokens: NDArray[np.int64], answer: DelayedChoice
) -> DelayState:
    before = arrivals.state
    deferred = np.setdiff1d(np.arange(len(doc_ids)), trained_documents(answer.choices))
    oldest_first = deferred[np.lexsort((doc_ids[deferred], arrivals.since_step[deferred]))].tolist()
    return DelayState(
        waiting=tuple(
            Waiting(
                doc_id=int(doc_ids[index]),
                since_step=int(arrivals.since_step[index]),
                is_left_over=index in answer.left_over,
            )
            for index in oldest_first
        ),
        outlier_lengths=answer.outlier_lengths,
        sample=answer.sample,
        num_batches=before.num_batches + 1,
        waited_tokens=FADE * before.waited_tokens + int(num_tokens[deferred].sum()),
        arrived_tokens=FADE * before.arrived_tokens + int(num_tokens[arrivals.is_new].sum()),
    )


def mean_token_delay_steps(age_steps: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> float:
    """Return the steps by which a trained token is late on average (WLB §7.4); 0 without tokens."""
    total = int(num_tokens.sum())
    return float((age_steps * num_tokens).sum() / total) if total else 0.0


@dataclass(frozen=True, eq=False)
class AtHand:
    """Hold the documents that a step may train: `work_s` float64[n] seconds, `age_steps` int64[n], `must`, `may_wait`
    bool[n], and `new_work_s`, the seconds of those that came with this step."""

    work_s: NDArray[np.float64]
    age_steps: NDArray[np.int64]
    must: NDArray[np.bool_]
    may_wait: NDArray[np.bool_]
    new_work_s: float
    num_micro_batches: int
    max_delay_steps: int
    recent_delay_steps: float


def release_balanced(hand: AtHand) -> NDArray[np.bool_]:
    """Choose the documents to train now; bool[n], at least one document."""
    fixed = hand.must | ~hand.may_wait
    free = np.flatnonzero(~fixed)
    # Longest first; of equal documents the youngest wait.
    free = free[np.lexsort((hand.age_steps[free], -hand.work_s[free]))]
    num_free = len(free)
    if not num_free:
        return np.ones(len(fixed), bool)
    works, fixed_works = hand.work_s[free], np.sort(hand.work_s[fixed])[::-1]
    waiting_s = np.concatenate([[0.0], np.cumsum(works)])
    degrees = _estimate(works, fixed_works, waiting_s, hand.num_micro_batches)
    most = min(num_free, WAITING_PER_MICRO_BATCH * hand.num_micro_batches)
    if not len(fixed_works):
        most = min(most, num_free - 1)  # a step trains something
    # Where a document waits its twins wait too: a step gains nothing by some of them.
    is_edge = np.concatenate([[True], works[1:] < works[:-1], [True]])[: most + 1]
    degrees = degrees[: most + 1]
    beyond, left = hand.recent_delay_steps - EASY_DELAY_STEPS, MOST_DELAY_STEPS - hand.recent_delay_steps
    looser = LOOSER_PER_STEP * max(0.0, beyond) * (MOST_DELAY_STEPS - EASY_DELAY_STEPS)
    limit = np.inf if left <= 0 else TIGHT_DEGREE + looser / left
    even = is_edge & (degrees <= limit)
    if hand.recent_delay_steps <= EASY_DELAY_STEPS and even.any() and not hand.must.any():
        waiting = int(even.argmax())
        enough = even & (waiting_s[: most + 1] >= _reserve_s(hand, free[:waiting]))
        even = enough if enough.any() else even
    places = np.flatnonzero(even)[:PLACES_TRIED]
    least = np.argsort(np.where(is_edge, degrees, np.inf), kind="stable")[:PLACES_TRIED]
    best, best_degree = 0, np.inf
    for place in dict.fromkeys([*places.tolist(), *least[is_edge[least]].tolist()]):
        degree = _degree(np.concatenate([fixed_works, works[place:]]), hand.num_micro_batches)
        if (degree, place) < (best_degree, best):
            best, best_degree = place, degree
        if degree <= limit:
            break
    due = np.ones(len(fixed), bool)
    due[free[:best]] = False
    return due


def _estimate(
    works: NDArray[np.float64], fixed_works: NDArray[np.float64], waiting_s: NDArray[np.float64], n: int
) -> NDArray[np.float64]:
    """Bound the degree from below with the first i free documents waiting, for i = 0 .. all; float64[free + 1]: the
    longest micro-batch has at least the longest document, the mean, and the N-th and next longest together."""
    num_free = len(works)
    total_s = fixed_works.sum() + np.maximum(waiting_s[-1] - waiting_s, 0.0)
    longest = np.append(works, 0.0)
    if num_free > n:
        longest[: num_free - n] = np.maximum(longest[: num_free - n], works[n - 1 : num_free - 1] + works[n:])
    longest = np.maximum(longest, fixed_works[0] if len(fixed_works) else 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = np.maximum(longest, total_s / n) * n / total_s
    return np.where(total_s > 0, degrees, 1.0)


def _reserve_s(hand: AtHand, waiting: NDArray[np.int64]) -> float:
    """Return the seconds of work that should wait after this step for the sake of the longest document that waits."""
    if not len(waiting):
        return 0.0
    steps = int(hand.age_steps[waiting].max()) + 1
    wanted_s = hand.num_micro_batches * float(hand.work_s[waiting[0]]) - hand.new_work_s
    saved_s = float(hand.work_s[hand.may_wait & (hand.age_steps > 0)].sum())
    return min(wanted_s * steps / hand.max_delay_steps, saved_s + RESERVE_SHARE * hand.new_work_s)


def _degree(work_s: NDArray[np.float64], n: int) -> float:
    """Return max·N / total of the documents packed longest first; 1 without work."""
    total_s = float(work_s.sum())
    return max(_longest_first_loads(work_s, n)) * n / total_s if total_s > 0 else 1.0


def queue_of(num_tokens: NDArray[np.int64], outlier_lengths: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the queue `i` with `L_i <= length < L_{i+1}` from 0, -1 for documents that are no outliers; int64[n]."""
    return np.searchsorted(np.array(outlier_lengths, np.int64), num_tokens, side="right").astype(np.int64) - 1


def tune_outlier_lengths(
    lengths: NDArray[np.int64],
    work_s: NDArray[np.float64],
    *,
    num_documents: int,
    num_micro_batches: int,
    num_queues: int,
    max_delay_steps: int,
) -> tuple[int, ...]:
    """Tune thresholds for at most `num_queues` queues on a sample of lengths (int64[n]) and seconds (float64[n])."""
    draws = np.random.default_rng(0).integers(0, len(lengths), (TUNING_STEPS, num_documents))
    descending = np.sort(lengths)[::-1]
    above = np.cumsum(descending) / float(descending.sum())
    at = np.minimum(np.searchsorted(above, TOKEN_SHARES), len(descending) - 1)
    levels = sorted(set(descending[at].tolist()))
    batches, tried = (lengths[draws], work_s[draws]), list[tuple[float, float, tuple[int, ...]]]()
    for size in range(num_queues + 1):
        for chosen in itertools.combinations(levels, size):
            tried.append((*simulate_queues(*batches, chosen, num_micro_batches, max_delay_steps), chosen))
    # Without a threshold there is no delay, so at least that one is within the target.
    return min(one for one in tried if one[1] <= TARGET_DELAY_STEPS)[2]


def simulate_queues(
    lengths: NDArray[np.int64],
    work_s: NDArray[np.float64],
    outlier_lengths: tuple[int, ...],
    num_micro_batches: int,
    max_delay_steps: int,
) -> tuple[float, float]:
    """Run Algorithm 1 over batches [steps, documents] without token limit; return the mean imbalance degree
    `max · N / total` after the warm-up, and the mean token delay in steps."""
    steps, n = len(lengths), num_micro_batches
    filler_s = FILLER_SHARE * float(work_s.sum()) / (steps * n)
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
            now, total_s = work[due], float(work[due].sum())
            longest_s = max(_longest_first_loads(now[now > filler_s], n))
            degrees.append(max(longest_s, total_s / n) * n / total_s if total_s > 0 else 1.0)
    late += int(((steps - held_since) * held_tokens).sum())
    return float(np.mean(degrees)), late / float(lengths.sum())


def due_documents(
    work_s: NDArray[np.float64],
    age_steps: NDArray[np.int64],
    queue: NDArray[np.int64],
    num_micro_batches: int,
    max_delay_steps: int,
) -> NDArray[np.bool_]:
    """Choose the documents, given oldest first, that a step trains (bool[n]): all in no queue (-1), floor(len / N)·N of
    every queue, all overdue, and waiting ones that make no micro-batch the longest. O(n log n)."""
    n = num_micro_batches
    due = (queue < 0) | (age_steps >= max_delay_steps)
    for level in range(int(queue.max(initial=-1)) + 1):
        members = np.flatnonzero(queue == level)
        due[members[: len(members) // n * n]] = True
    waiting = np.flatnonzero(~due)
    if not len(waiting):
        return due
    if not due.any():
        due[waiting[:n]] = True  # a step trains something
        waiting = waiting[n:]
    total = float(work_s[due].sum())
    smallest = float(work_s[waiting].min(initial=np.inf))
    # Documents far below the waiting ones fill up what is left.
    loads = _longest_first_loads(work_s[due & (work_s > smallest / 4)], n)
    longest = max(loads)
    for index, work in zip(waiting.tolist(), work_s[waiting].tolist(), strict=True):
        if loads[0] + work <= max(longest, (total + work) / n):
            longest = max(longest, loads[0] + work)
            heapq.heapreplace(loads, loads[0] + work)
            total += work
            due[index] = True
    return due


def _longest_first_loads(work_s: NDArray[np.float64], num_groups: int) -> list[float]:
    work_s = np.sort(work_s)[::-1]
    group = pack_greedily(work_s, np.ones(len(work_s), np.int64), num_groups, None)
    return sorted(np.bincount(group, weights=work_s, minlength=num_groups).tolist())
