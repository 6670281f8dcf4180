"""Documents to replicas of different paces: longest first to where each would end first, then exchanges.

Machines of different speeds are Graham's problem with related machines: the longest document left goes to the replica
on which it ends first (Gonzalez, Ibarra and Sahni 1977; at most twice the optimum in theory). Of few documents that can
leave a gap, so the slowest replica then gives documents away, or exchanges one for a shorter one, while that makes the
later of both end earlier. Where documents are many, the first pass is within `CLOSE` of the bound and nothing is
exchanged. O(n · dp).

What a replica takes for its documents is known only when its packs are simulated (filling a pipeline with one slow rank
takes another share than working in it), so `deal_until_even` deals again by what the simulation gave.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

CLOSE = 1.002
"""Of the bound, all replicas ending together: what needs no exchange."""
MOST_EXCHANGES = 4
"""For each replica."""
MOST_TRIED = 256
"""Documents of a replica that are tried in an exchange, evenly chosen by length where there are more."""
DEALS = 3
"""Times that documents are dealt, at most."""
EVEN = 1.01
"""Max/mean simulated time of replicas at which they are not dealt again."""

Found = TypeVar("Found")


def deal_by_pace(
    work_s: NDArray[np.float64], paces: NDArray[np.float64], load_s: NDArray[np.float64] | None = None
) -> list[NDArray[np.int64]]:
    """Document indices of every replica, each ascending (arrival order); a replica may be empty.

    Args:
        work_s: float64[n], seconds of every document on a replica of pace 1.
        paces: float64[dp], seconds of a replica for one second of work; above 0.
        load_s: float64[dp], when each replica begins; None = at once.
    """
    ends_s = np.zeros(len(paces)) if load_s is None else np.array(load_s, np.float64)
    together_s = float((work_s.sum() + (ends_s / paces).sum()) / (1.0 / paces).sum())
    own: list[list[int]] = [[] for _ in paces]
    for document in np.argsort(-work_s, kind="stable").tolist():
        replica = int((ends_s + paces * work_s[document]).argmin())
        own[replica].append(document)
        ends_s[replica] += paces[replica] * work_s[document]
    for _ in range(MOST_EXCHANGES * len(paces)):
        if ends_s.max() <= CLOSE * together_s or not _exchange(own, ends_s, work_s, paces):
            break
    return [np.sort(np.array(group, np.int64)) for group in own]


def _exchange(
    own: list[list[int]], ends_s: NDArray[np.float64], work_s: NDArray[np.float64], paces: NDArray[np.float64]
) -> bool:
    """The best exchange of the slowest replica with any other, in place; False where none helps."""
    slow = int(ends_s.argmax())
    given = _some(own[slow], work_s)
    best: tuple[float, int, int, int | None] | None = None
    for fast in range(len(own)):
        if fast == slow or not given:
            continue
        taken: list[int | None] = [*_some(own[fast], work_s), None]
        taken_s = np.array([0.0 if document is None else work_s[document] for document in taken])
        less_s = work_s[given][:, None] - taken_s[None, :]
        later_s = np.maximum(ends_s[slow] - paces[slow] * less_s, ends_s[fast] + paces[fast] * less_s)
        at = np.unravel_index(int(later_s.argmin()), later_s.shape)
        if best is None or later_s[at] < best[0]:
            best = float(later_s[at]), fast, given[int(at[0])], taken[int(at[1])]
    # What is the same to rounding would go to and fro.
    if best is None or best[0] >= ends_s[slow] * (1 - 1e-9):
        return False
    _, fast, gives, takes = best
    own[slow].remove(gives)
    own[fast].append(gives)
    if takes is not None:
        own[fast].remove(takes)
        own[slow].append(takes)
    less_s = float(work_s[gives] - (0.0 if takes is None else work_s[takes]))
    ends_s[slow] -= paces[slow] * less_s
    ends_s[fast] += paces[fast] * less_s
    return True


def _some(documents: list[int], work_s: NDArray[np.float64]) -> list[int]:
    if len(documents) <= MOST_TRIED:
        return documents
    by_work = sorted(documents, key=lambda document: (float(work_s[document]), document))
    return [by_work[at] for at in np.linspace(0, len(by_work) - 1, MOST_TRIED).astype(int).tolist()]


def deal_until_even(
    work_s: NDArray[np.float64],
    paces: NDArray[np.float64],
    plan: Callable[[list[NDArray[np.int64]]], Found | None],
    outcome: Callable[[Found], tuple[Sequence[NDArray[np.int64]], NDArray[np.float64]]],
    worth: Callable[[Found], Any],
) -> Found | None:
    """The best plan of documents dealt by pace, and dealt again by the paces that a plan showed.

    Args:
        plan: from the documents of every replica; None where there is none.
        outcome: of a plan, the documents and the simulated seconds of every replica.
        worth: smaller is better.
    """
    best: Found | None = None
    for _ in range(DEALS):
        found = plan(deal_by_pace(work_s, paces))
        if found is None:
            return best
        if best is None or worth(found) < worth(best):
            best = found
        groups, seconds = outcome(found)
        if seconds.max() <= EVEN * seconds.mean():
            return best
        work = np.array([float(work_s[group].sum()) for group in groups])
        paces = np.where(work > 0, seconds / np.where(work > 0, work, 1.0), paces)
    return best
