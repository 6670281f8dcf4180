"""`sequential`: concatenate documents in arrival order and cut at the window; what common loaders do.

    arrival   A A A B B C C C C C D | windows of 4:   [A A A B0] [B1 C0 C0 C0] [C1 C1 D]

Common loaders let such pieces be trained as if they were documents (or let attention cross documents). Here a
piece is a slice: its attention sees its document from the start, so training equals plain training. Forward packs
are the windows. Backward packs hold the same slices, documents in order and slices last-first, filled up to the
window again; so a document's slices lie in different packs and there may be a few more packs than windows. A
document has one replica: replicas get consecutive documents, cut where the tokens are nearest to equal. 1F1B, as it is
for packs that differ; the list schedule where that exceeds memory. O(n + windows).
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pipeline_tasks import pipeline_tasks
from evenload.errors import ConfigError
from evenload.plan.problem.candidate import Candidate, scheduled_candidate
from evenload.plan.problem.options import CHOOSE
from evenload.plan.problem.step_problem import ReplicaChoice, StepProblem
from evenload.plan.strategies.strategy import Strategy
from evenload.schedule.packflow import LIST
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.types.columns import SliceColumns

Piece = tuple[int, int, int]
"""(document, start, stop)."""


def plan_sequential(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    window = problem.options.max_pack_tokens
    if window is None:
        raise ConfigError("strategy sequential cuts at windows of max_pack_tokens; set it")
    return tuple(
        ReplicaChoice(documents, _candidate(problem, documents, window))
        for documents in _consecutive(problem.num_tokens, problem.layout.dp)
    )


def sequential_packs(num_tokens: list[int], window: int) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Forward and backward packs of documents in order."""
    forward: list[list[Piece]] = []
    pieces: list[list[Piece]] = []  # by document
    room = 0
    for document, length in enumerate(num_tokens):
        start = 0
        pieces.append([])
        while start < length:
            if not room:
                forward.append([])
                room = window
            stop = min(length, start + room)
            pieces[-1].append((document, start, stop))
            forward[-1].append(pieces[-1][-1])
            room -= stop - start
            start = stop
    backward: list[list[Piece]] = []
    room = 0
    for own in pieces:
        for piece in reversed(own):
            size = piece[2] - piece[1]
            # Two slices of one document never share a pack: the later one's gradients must be there first.
            if size > room or backward[-1][-1][0] == piece[0]:
                backward.append([])
                room = window
            backward[-1].append(piece)
            room -= size
    return forward, backward


def _consecutive(num_tokens: NDArray[np.int64], dp: int) -> list[NDArray[np.int64]]:
    """Runs of documents, one a replica; every border at the document edge nearest to its share of the tokens."""
    edges = np.concatenate([[0], np.cumsum(num_tokens)])
    shares = edges[-1] * np.arange(1, dp) / dp
    borders = [0, *(int(np.abs(edges - share).argmin()) for share in shares), len(num_tokens)]
    return [np.arange(lo, hi, dtype=np.int64) for lo, hi in pairwise(borders)]


def _candidate(problem: StepProblem, documents: NDArray[np.int64], window: int) -> Candidate:
    num_tokens = problem.num_tokens[documents]
    packs = sequential_packs(num_tokens.tolist(), window)
    forward, backward = (SliceColumns.from_ranges(pieces, problem.layout.cp) for pieces in packs)
    policy = problem.policy_of(documents)
    rules = (ONE_F_ONE_B, LIST) if problem.options.schedule == CHOOSE else (problem.options.rule(ONE_F_ONE_B),)
    tasks = pipeline_tasks(problem.costs, forward, backward, num_tokens, policy, split=rules[0].splits_backward)
    found: list[Candidate] = []
    for rule in rules:
        label = f"{forward.num_packs} windows"
        found.append(scheduled_candidate(label, forward, backward, tasks, rule, problem.cap_bytes, policy))
        if not found[-1].excess_bytes:
            return found[-1]
    return min(found, key=Candidate.score)


SEQUENTIAL = Strategy(
    name="sequential",
    description="cuts the stream of documents at the window: a baseline",
    plan=plan_sequential,
    cuts_documents=True,
    ignores_memory=True,
)
