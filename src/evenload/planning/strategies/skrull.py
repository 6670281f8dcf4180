"""Plan by `skrull`: global data scheduling and distributed-aware context parallelism, without a pipeline (Skrull §4).

A rank's bucket of tokens follows from the memory model (Skrull fits a line, C.1); `plan.dacp` forms micro-batches of at
most bucket · cp tokens and decides which documents of each are shared. A micro-batch costs `max(transfers, local) +
shared` on its slowest rank (eq. 2), forward and backward each. Where a document does not fit a micro-batch of its own,
the step is planned with the least bucket that can hold it and reported as beyond memory.
"""

import dataclasses
import itertools

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import ReplicaPacks, pipeline_bytes
from evenload.cost.pack_split import rank_seconds
from evenload.planning.candidates import idle_candidate
from evenload.planning.dacp import SHARED, Groups, MicroBatch, StepDocuments, assign_micro_batches, assign_owners
from evenload.planning.problem import ReplicaChoice, StepProblem, StrategyOptions
from evenload.planning.strategies.strategy import Strategy
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.stepplan.cp_rows import ranked_if_shared
from evenload.types.columns import whole_document_columns
from evenload.types.document import Direction
from evenload.types.pipeline import PipelineTasks
from evenload.types.text import counted

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PUBLISHED_NOTE = "as published: Algorithms 1 and 2 alone"
BUCKETS_TRIED = 64  # Bucket sizes priced at once: four rounds find the largest of 2^24


class SkrullOptions(StrategyOptions, tag="skrull"):
    """Set what `skrull` tries.

    Args:
        as_published: Skrull's Algorithms 1 and 2 alone, with the repairs that they need to end within memory: documents
            interleaved into micro-batches, whole on a rank while one can hold them.
    """

    as_published: bool = False


def plan_skrull(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    bucket = bucket_tokens(problem)
    step = step_documents(problem, bucket)
    replicas = assign_micro_batches(step)
    if replicas is None:
        step = step_documents(problem, int(step.columns.share_tokens().max()))
        replicas = assign_micro_batches(step)
        assert replicas is not None, "a document of its own fits a bucket of its share"
    return _choices(problem, step, replicas)


def can_fit(problem: StepProblem) -> bool:
    """Check whether memory holds every document in a micro-batch of its own; otherwise no plan of the step fits."""
    if problem.cap_bytes is None or not len(problem.num_tokens):
        return True
    least = np.array([-(-int(problem.num_tokens.max()) // problem.layout.cp)])
    return bool((_peak_bytes(problem, least) <= int(problem.cap_bytes.min())).all())


def step_documents(problem: StepProblem, bucket: int) -> StepDocuments:
    costs, cp, num_tokens = problem.costs, problem.layout.cp, problem.num_tokens
    limit = bucket * cp
    if problem.options.max_pack_tokens is not None:
        limit = min(limit, problem.options.max_pack_tokens)
    local_s = costs.document_seconds(num_tokens, problem.policy, ranks=1)
    alone = whole_document_columns([[index] for index in range(len(num_tokens))], num_tokens, cp)
    gather_s = sum(costs.context_seconds(alone, direction)[0].sum(axis=1) for direction in _DIRECTIONS)
    columns = MicroBatch(num_tokens, local_s, problem.document_s, np.asarray(gather_s), cp, bucket)
    empty = whole_document_columns([[]], num_tokens, cp)
    pack_s = sum(float(costs.compute_seconds(empty, direction).sum()) for direction in _DIRECTIONS)
    published = problem.options.own(SkrullOptions).as_published
    return StepDocuments(columns, problem.layout.dp, limit, pack_s, published)


def bucket_tokens(problem: StepProblem) -> int:
    """Count the tokens that one rank may hold in a micro-batch (Skrull's C); 0 = nothing fits, without a limit the
    whole step's."""
    most = max(1, int(problem.num_tokens.sum()))
    if problem.cap_bytes is None:
        return most
    cap = int(problem.cap_bytes.min())
    low, high = 0, most
    while low < high:  # the most that fits lies in low..high; as many parts as are cheap to price at once
        tried = np.unique(np.linspace(low, high, BUCKETS_TRIED + 1).astype(np.int64)[1:])
        fitting = int((_peak_bytes(problem, tried) <= cap).sum())  # bytes grow with tokens
        low = int(tried[fitting - 1]) if fitting else low
        high = int(tried[fitting]) - 1 if fitting < len(tried) else high
    return low


def _peak_bytes(problem: StepProblem, buckets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the peak of every bucket, full of shared tokens under the most expensive policy; int64[buckets]."""
    codes = np.array([0] if problem.policy is None else np.unique(problem.policy), np.int8)
    tokens = np.tile(buckets * problem.layout.cp, len(codes))
    columns = whole_document_columns([[index] for index in range(len(tokens))], tokens, problem.layout.cp)
    packs = ReplicaPacks(columns, columns, tokens, np.repeat(codes, len(buckets)))
    held = pipeline_bytes(problem.costs.model, problem.layout, packs)
    temporary = np.maximum(held.forward_temp_bytes, held.backward_temp_bytes)
    peak = (held.static_bytes + held.forward_kept_bytes + temporary).max(axis=1)
    return peak.reshape(len(codes), len(buckets)).max(axis=0)


def _choices(problem: StepProblem, step: StepDocuments, replicas: list[Groups]) -> tuple[ReplicaChoice, ...]:
    """Find owners for the documents of all micro-batches, and price and simulate every replica's."""
    costs, cp, policy = problem.costs, problem.layout.cp, problem.policy
    groups = [group for of_replica in replicas for group in of_replica]
    owned = assign_owners(step.columns, groups, as_published=step.as_published)
    assert np.isfinite(owned.seconds).all(), "GDS forms only micro-batches that DACP finds owners for"
    columns = whole_document_columns(groups, problem.num_tokens)
    columns = dataclasses.replace(columns, cp=np.where(owned.owner == SHARED, cp, 1))
    owner, edges = owned.owner.tolist(), columns.pack_offset.tolist()
    shardings = [tuple(owner[low:high]) for low, high in itertools.pairwise(edges)]
    forward_s, backward_s = (
        costs.pack_seconds(columns, direction, policy)
        if packs is None
        else packs.slowest(rank_seconds(costs, packs, direction, policy))
        for packs, direction in zip(ranked_if_shared(costs, columns, columns, shardings), _DIRECTIONS, strict=True)
    )
    packs = ReplicaPacks(columns, columns, problem.num_tokens, policy, (owned.owner, owned.owner))
    held = pipeline_bytes(costs.model, costs.layout, packs)
    choices, note = [], PUBLISHED_NOTE if step.as_published else ""
    for low, high in itertools.pairwise(np.cumsum([0, *map(len, replicas)]).tolist()):
        documents = np.sort(columns.doc[edges[low] : edges[high]]).astype(np.int64)
        if low == high:
            choices.append(ReplicaChoice(documents, idle_candidate(problem), note))
            continue
        own = columns.pack_range(low, high)
        own = dataclasses.replace(own, doc=np.searchsorted(documents, own.doc).astype(np.int32))
        tasks = PipelineTasks(
            forward_s=forward_s[low:high],
            backward_s=backward_s[low:high],
            p2p_forward_s=np.zeros(high - low),
            p2p_backward_s=np.zeros(high - low),
            forwards_needed=np.arange(1, high - low + 1, dtype=np.int32),
            stage_to_rank=np.array(problem.layout.stage_to_rank, np.int32),
            held=held.rows(slice(low, high)),
        )
        shared = owner[edges[low] : edges[high]].count(SHARED)
        counts = counted(high - low, "micro-batch"), counted(len(documents), "document")
        label = f"{counts[0]}, {shared} of {counts[1]} shared"
        result = problem.scheduled(label, problem.packs_of(documents, own), ONE_F_ONE_B, tasks)
        if cp > 1:
            result = dataclasses.replace(result, shardings=tuple(shardings[low:high]))
        choices.append(ReplicaChoice(documents, result, note))
    return tuple(choices)


SKRULL = Strategy(
    name="skrull",
    description="short documents whole on one rank, long ones shared by the context-parallel group",
    plan=plan_skrull,
    options=SkrullOptions,
    can_fit=can_fit,
    assigns_ranks=True,
    needs_one_stage=True,
)
