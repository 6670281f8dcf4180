"""Short documents move from the slowest replica to the fastest, by simulated time."""

import numpy as np

from evenload.plan.search.found_step import FoundStep
from evenload.plan.search.probe_rating import has_trial
from evenload.plan.search.replica_search import ReplicaSearch, score

EVEN_REPLICAS = 1.003
"""Max/mean time of replicas at which no more documents move."""
MOST_MOVES = 2
"""Documents moved, for each replica."""
MOVED_SHARES = (0.5, 0.25, 0.1)
"""Of the gap between the slowest and the fastest replica: documents that are tried, until one helps."""
MOVED_TRIALS = 3
"""Best trials of a replica that are rated again when its documents change."""


def even_out(found: FoundStep) -> None:
    """Move documents from the slowest replica to the fastest while that makes the slower of both faster."""
    for _ in range(MOST_MOVES * len(found.own)):
        seconds = found.seconds()
        slow, fast = int(seconds.argmax()), int(seconds.argmin())
        if seconds[slow] <= EVEN_REPLICAS * seconds.mean() or len(found.own[slow].documents) < 2:
            return
        # A document that fills half the gap; where memory makes that one too expensive, smaller ones.
        if not any(_move(found, slow, fast, (seconds[slow] - seconds[fast]) * share) for share in MOVED_SHARES):
            return


def _move(found: FoundStep, slow: int, fast: int, wanted_s: float) -> bool:
    """Move one document of about so many seconds, unless the slower of both replicas does not gain."""
    one, other = found.own[slow], found.own[fast]
    problem = one.problem
    busy_share = one.work_s / (problem.layout.pp * one.best().makespan_s)
    moved = int(np.abs(problem.document_s[one.documents] - wanted_s * problem.layout.pp * busy_share).argmin())
    trials = one.ranking()[:MOVED_TRIALS]
    lighter = ReplicaSearch(problem, np.delete(one.documents, moved), worth=one.worth, known=one.pool)
    joined = np.sort(np.append(other.documents, one.documents[moved]))
    heavier = ReplicaSearch(other.problem, joined, worth=one.worth, known=one.pool)
    score([(lighter, trials), (heavier, [*other.ranking()[:MOVED_TRIALS], *trials])])
    if not (has_trial(lighter) and has_trial(heavier)):
        return False
    starts_s = found.start_s(slow), found.start_s(fast)
    if _slower(starts_s, (lighter, heavier)) >= _slower(starts_s, (one, other)):
        return False
    found.own[slow], found.own[fast] = lighter, heavier
    return True


def _slower(starts_s: tuple[float, float], searches: tuple[ReplicaSearch, ReplicaSearch]) -> tuple[int, float]:
    """What two replicas are worth together: the worse of both."""
    worth = [search.worth(search.best()) for search in searches]
    return (
        max(excess for excess, _ in worth),
        max(start_s + seconds for start_s, (_, seconds) in zip(starts_s, worth, strict=True)),
    )
