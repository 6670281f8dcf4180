"""Which documents a step of `wlb` trains so that its micro-batches come out even: queues without fixed lengths.

WLB's queues release N outliers at a time, so that each of N micro-batches gets one of about the same length. What
that buys is that the longest micro-batch is no longer than the mean. This rule asks for it directly: the longest
documents wait, and how many of them is decided anew every step.

    all documents at hand, longest first    | 1 2 3 4 | 5 6 7 8 9 …
                                              wait      trained now

Of all places for the bar the first is taken (the fewest wait) at which the degree max·N / total is within `limit`.
Few long documents at hand: they wait, the step is small and even. Enough of them: all go, the step is large and even.
So documents of any length gather until they fill N micro-batches together, whatever the lengths look like, and
nothing needs tuning. Where no place is within the limit, the one of least degree is taken.

Two more rules. The limit follows the delay of the recent steps: tight as long as that is small, looser beyond
`EASY_DELAY_STEPS`, so delay settles near half a step. And a document too rare to ever gather company must be trained
at `max_delay_steps` anyway; while it waits, the steps before save up to `RESERVE_SHARE` of a batch's work each (the
longest documents: least tokens for that work), so that the step which trains it is large.

Degrees are first estimated for all places at once from sums, a few are then packed. O(n log n).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.plan.packing.var_length import pack_greedily

TIGHT_DEGREE = 1.03
"""Degree within which a step counts as even, while delay is small."""
EASY_DELAY_STEPS = 0.42
"""Recent mean token delay up to which the limit stays tight."""
MOST_DELAY_STEPS = 0.5
"""Recent mean token delay from which every step counts as even: nothing waits (WLB §7.4 reports half a step)."""
LOOSER_PER_STEP = 3.0
"""By how much the limit grows per step of delay beyond `EASY_DELAY_STEPS`; ever more towards `MOST_DELAY_STEPS`."""
RESERVE_SHARE = 0.2
"""Of a batch's work: saved a step for a document that cannot be balanced otherwise."""
PLACES_TRIED = 8
"""Places whose degree is found by packing: of those that may be even, and of all if none is."""
WAITING_PER_MICRO_BATCH = 6
"""Most documents that wait, in micro-batches: beyond, a step would train next to nothing."""


@dataclass(frozen=True, eq=False)
class AtHand:
    """The documents a step may train.

    Args:
        work_s: float64[n] seconds; age_steps: int64[n].
        must: bool[n], to be trained in this step.
        may_wait: bool[n].
        new_work_s: seconds of the documents that came with this step.
        num_micro_batches: N.
        max_delay_steps: age at which a document must be trained.
        recent_delay_steps: mean token delay of the recent steps.
    """

    work_s: NDArray[np.float64]
    age_steps: NDArray[np.int64]
    must: NDArray[np.bool_]
    may_wait: NDArray[np.bool_]
    new_work_s: float
    num_micro_batches: int
    max_delay_steps: int
    recent_delay_steps: float


def release_balanced(hand: AtHand) -> NDArray[np.bool_]:
    """Which documents to train now; bool[n], at least one document."""
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
        most = min(most, num_free - 1)  # a step never trains nothing
    # Where a document waits its twins wait too: a step gains nothing by some of them.
    is_edge = np.concatenate([[True], works[1:] < works[:-1], [True]])[: most + 1]
    degrees = degrees[: most + 1]
    limit = _limit(hand.recent_delay_steps)
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


def _limit(recent_delay_steps: float) -> float:
    """Degree within which a step counts as even."""
    beyond, left = recent_delay_steps - EASY_DELAY_STEPS, MOST_DELAY_STEPS - recent_delay_steps
    if left <= 0:
        return np.inf
    return TIGHT_DEGREE + LOOSER_PER_STEP * max(0.0, beyond) * (MOST_DELAY_STEPS - EASY_DELAY_STEPS) / left


def _estimate(
    works: NDArray[np.float64],
    fixed_works: NDArray[np.float64],
    waiting_s: NDArray[np.float64],
    n: int,
) -> NDArray[np.float64]:
    """A lower estimate of the degree with the first i free documents waiting, for i = 0 .. all; float64[free + 1].

    The longest micro-batch is at least the longest document, the mean, and the N-th and next longest together, because
    two of the N + 1 longest share one.
    """
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
    """Seconds of work that should wait after this step for the sake of the longest document that waits."""
    if not len(waiting):
        return 0.0
    steps = int(hand.age_steps[waiting].max()) + 1
    wanted_s = hand.num_micro_batches * float(hand.work_s[waiting[0]]) - hand.new_work_s
    saved_s = float(hand.work_s[hand.may_wait & (hand.age_steps > 0)].sum())
    return min(wanted_s * steps / hand.max_delay_steps, saved_s + RESERVE_SHARE * hand.new_work_s)


def _degree(work_s: NDArray[np.float64], n: int) -> float:
    """max·N / total of the documents packed longest first; 1 without work."""
    work_s = np.sort(work_s)[::-1]
    total_s = float(work_s.sum())
    if total_s <= 0:
        return 1.0
    group = pack_greedily(work_s, np.ones(len(work_s), np.int64), n, None)
    return float(np.bincount(group, weights=work_s, minlength=n).max()) * n / total_s
