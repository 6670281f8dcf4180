"""Search over all replicas of a step: what `slimpack` and `auto` share.

    1  the heaviest replica, and the one with the longest document, rate the first trials, then other schedules of the
       best packs
    2  every other replica, which holds nearly equal work, rates the best few of those
    3  replicas are evened out: short documents move from the slowest to the fastest, by simulated time

Documents that groups of replicas share (DP-Merge) come before, each block's in its own search; replicas then start
from different times, which step 3 takes into account. `auto` goes on from there (`plan.search.refine_step`).

Everything is counted in trials, never by the clock, so plans are deterministic.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.plan.packing.dp_merge import Merge
from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.search.even_replicas import even_out
from evenload.plan.search.found_step import FoundStep, starts_s
from evenload.plan.search.probe_rating import SearchRules, rate_by_probe
from evenload.plan.search.replica_search import ReplicaSearch, score
from evenload.types.replica_block import ReplicaBlock


def search_step(problem: StepProblem, replicas: Sequence[NDArray[np.int64]], rules: SearchRules) -> FoundStep | None:
    """The best found for documents assigned to replicas; None where no trial of theirs is possible."""
    return _search(problem, list(replicas), {}, rules)


def search_merged(problem: StepProblem, merge: Merge, rules: SearchRules, pipeline_share: float) -> FoundStep | None:
    """As `search_step`, where blocks of replicas share some documents.

    Args:
        pipeline_share: of a pipeline's time that computes, from an earlier search: a replica's own documents are
            assigned by the time that the shared ones leave it.
    """
    blocks = {
        block: ReplicaSearch(problem, documents, block.size * problem.layout.cp, rules.worth, rules.known)
        for block, documents in merge.blocks.items()
    }
    if not _rate_blocks(blocks, rules):
        return None
    load_s = starts_s(blocks, problem.layout.dp) * problem.layout.pp
    own = merge.deal_own(problem.document_s / pipeline_share, load_s)
    return _search(problem, own, blocks, rules)


def _rate_blocks(blocks: dict[ReplicaBlock, ReplicaSearch], rules: SearchRules) -> bool:
    """Of blocks of one size the one with most work is the probe, as among replicas; whether all have a trial."""
    for size in dict.fromkeys(block.size for block in blocks):
        alike = [search for block, search in blocks.items() if block.size == size]
        probe = max(alike, key=lambda search: search.work_s)
        if not rate_by_probe(probe, [search for search in alike if search is not probe], [probe], rules):
            return False
    return True


def _search(
    problem: StepProblem,
    replicas: list[NDArray[np.int64]],
    blocks: dict[ReplicaBlock, ReplicaSearch],
    rules: SearchRules,
) -> FoundStep | None:
    searches = [ReplicaSearch(problem, documents, worth=rules.worth, known=rules.known) for documents in replicas]
    found = FoundStep(searches, blocks)
    busy = [search for search in searches if len(search.documents)]
    if not busy:
        return found
    probe = max(busy, key=lambda search: search.work_s)
    longest = max(busy, key=lambda search: int(search.num_tokens.max()))
    others = [search for search in busy if search is not probe]
    if not rate_by_probe(probe, others, list(dict.fromkeys((probe, longest))), rules):
        return None
    if rules.even_out:
        even_out(found)
    # Last, because a replica that fits by a slow trial would give its documents away.
    if over := [search for search in found.own if search.best().excess_bytes]:
        score([(search, rules.spare(search)) for search in over])
        if rules.even_out:
            even_out(found)
    return found
