"""Activation policies replica by replica: each stores, recomputes or offloads as its own documents ask for.

A step is searched under one policy for all its documents, which the replica that memory presses most decides; the
others then save memory that they have. So each replica rates its best packs under the other policies, too, and where
one makes it faster, takes it; documents then move to where they are faster now (`plan.search.even_replicas`), and the
slowest replica looks again. What replicas share stays under the step's policy. InfiniPipe checkpoints by stage and by
chunk for the same reason.
"""

from collections.abc import Mapping, Sequence

from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.search.even_replicas import even_out
from evenload.plan.search.found_step import FoundStep
from evenload.plan.search.replica_search import NEAR_BOUND, KnownScores, ReplicaSearch, score

RATED = 4
"""Best trials of a replica that are rated under every other policy."""
MOST_ROUNDS = 3
"""How often documents move and replicas look again, at most."""


def choose_by_replica(found: FoundStep, problems: Sequence[StepProblem], known: Mapping[int, KnownScores]) -> None:
    """Give replicas other policies where that makes the step faster, in place; it is never worse after.

    Args:
        problems: the step under every policy.
        known: scores by a problem's `id`.
    """
    for _ in range(MOST_ROUNDS):
        before = found.worth()
        if not _take_better(found, problems, known):
            return
        even_out(found)
        if found.worth() >= before:
            return


def _take_better(found: FoundStep, problems: Sequence[StepProblem], known: Mapping[int, KnownScores]) -> bool:
    """Whether some replica got faster."""
    tried: list[tuple[int, ReplicaSearch]] = []
    for replica, search in enumerate(found.own):
        best = search.best()
        for problem in problems:
            under = problem.of_replica(replica)
            other = ReplicaSearch(under, search.documents, worth=search.worth, known=known[id(problem)])
            is_same = _codes(other) == _codes(search)
            # A policy whose work alone takes about as long cannot help, unless memory is exceeded.
            may_help = best.excess_bytes or best.makespan_s > NEAR_BOUND * other.work_s / problem.layout.pp
            if len(search.documents) and not is_same and may_help:
                tried.append((replica, other))
    score([(other, found.own[replica].ranking()[:RATED]) for replica, other in tried])
    is_better = False
    for replica, other in tried:
        one = found.own[replica]
        if other.ranking() and other.worth(other.best()) < one.worth(one.best()):
            found.own[replica], is_better = other, True
    return is_better


def _codes(search: ReplicaSearch) -> bytes:
    """Policies of the documents; nothing where all are stored."""
    return b"" if search.policy is None or not search.policy.any() else search.policy.tobytes()
