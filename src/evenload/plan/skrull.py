"""`skrull`: global data scheduling and distributed-aware context parallelism, without a pipeline (Skrull §4).

    1. bucket: tokens that one rank may hold, from the memory model; exact where Skrull fits a line (C.1)
    2. documents to replicas and micro-batches of at most bucket · cp tokens (GDS, eq. 8-11): `plan.micro_batching`
    3. in every micro-batch documents whole on one rank or shared by all, within the bucket (DACP, eq. 1-7):
       `plan.dacp`

A micro-batch costs `max(transfers, local) + shared` on its slowest rank (eq. 2), forward and backward each. Replicas
wait for each other at the end of the step only. Where a document does not fit a micro-batch of its own, the step is
planned with the least bucket that can hold it and reported as beyond memory. Price: that of `plan.micro_batching`.
"""

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import PipelineBytes, pipeline_bytes
from evenload.cost.owned_bytes import owned_pipeline_bytes, owned_sharding
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.plan.candidate import candidate, forwards_needed, one_f_one_b_candidate
from evenload.plan.dacp import SHARED, MicroBatch, assign_groups
from evenload.plan.micro_batching import Groups, StepDocuments, deal_micro_batches
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.schedule.one_f_one_b import one_f_one_b
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.layout import ParallelLayout
from evenload.types.micropack import Direction
from evenload.types.pipeline import PipelineTasks

BUCKETS_TRIED = 64
"""Bucket sizes priced at once: four rounds find the largest of 2^24."""


@dataclass(frozen=True, eq=False)
class _Priced:
    """One replica: owner int64[documents] in the order of its micro-batches, seconds float64[packs, 1], bytes."""

    owner: NDArray[np.int64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    held: PipelineBytes


def plan_skrull(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """One choice per replica.

    Raises:
        ConfigError: a layout with a pipeline.
        DataError: a document longer than `max_pack_tokens`.
    """
    require_flat(problem.layout)
    problem.require_whole_documents_fit("skrull")
    bucket = bucket_tokens(problem)
    step = step_documents(problem, bucket)
    dealt = deal_micro_batches(step)
    if dealt is None:
        least = int(step.columns.share_tokens().max())
        step = step_documents(problem, max(bucket, least))
        dealt = deal_micro_batches(step, search=False)
        assert dealt is not None, "a document of its own fits a bucket of its share"
    priced = _price(problem, step.columns, dealt)
    return tuple(_choice(problem, groups, found) for groups, found in zip(dealt, priced, strict=True))


def require_flat(layout: ParallelLayout) -> None:
    """Refuse a layout with a pipeline, also one of virtual stages on one rank.

    Raises:
        ConfigError: it has one.
    """
    if layout.num_stages > 1:
        raise ConfigError(
            f"strategy skrull: layout {layout.describe()} has a pipeline and Skrull has none; "
            "use pp=1 (with cp for long documents), or slimpack"
        )


def can_fit(problem: StepProblem) -> bool:
    """Whether memory holds every document in a micro-batch of its own; no other plan of the step fits otherwise."""
    if problem.cap_bytes is None or not len(problem.num_tokens) or problem.layout.num_stages > 1:
        return True  # a pipeline is refused when the step is planned, with its reason
    codes = np.array([0] if problem.policy is None else np.unique(problem.policy), np.int8)
    least = np.array([-(-int(problem.num_tokens.max()) // problem.layout.cp)])
    return bool((_peak_bytes(problem, least, codes) <= int(problem.cap_bytes.min())).all())


def step_documents(problem: StepProblem, bucket: int) -> StepDocuments:
    """The problem as GDS sees it: seconds of forward and backward together."""
    costs, cp, num_tokens = problem.costs, problem.layout.cp, problem.num_tokens
    limit = bucket * cp
    if problem.options.max_pack_tokens is not None:
        limit = min(limit, problem.options.max_pack_tokens)
    columns = MicroBatch(
        num_tokens,
        costs.document_seconds(num_tokens, problem.policy, ranks=1),
        problem.document_s,
        _gather_seconds(costs, num_tokens),
        cp,
        bucket,
    )
    empty = whole_document_columns([[]], num_tokens)
    pack_s = sum(float(costs.compute_seconds(empty, direction).sum()) for direction in ("forward", "backward"))
    return StepDocuments(columns, problem.document_s, problem.layout.dp, limit, pack_s, problem.options.backend)


def bucket_tokens(problem: StepProblem) -> int:
    """Tokens one rank may hold in a micro-batch, local or its share of longer documents (Skrull's C); 0 where
    nothing fits, and all tokens of the step where memory has no limit."""
    most = max(1, int(problem.num_tokens.sum()))
    if problem.cap_bytes is None:
        return most
    codes = np.array([0] if problem.policy is None else np.unique(problem.policy), np.int8)
    cap = int(problem.cap_bytes.min())
    low, high = 0, most
    while low < high:  # the most that fits lies in low..high; as many parts as are cheap to price at once
        tried = np.unique(np.linspace(low, high, BUCKETS_TRIED + 1).astype(np.int64)[1:])
        fitting = int((_peak_bytes(problem, tried, codes) <= cap).sum())  # bytes grow with tokens
        low, high = (
            int(tried[fitting - 1]) if fitting else low,
            int(tried[fitting]) - 1 if fitting < len(tried) else high,
        )
    return low


def _peak_bytes(problem: StepProblem, buckets: NDArray[np.int64], codes: NDArray[np.int8]) -> NDArray[np.int64]:
    """Of every bucket under the dearest policy, full of shared tokens, whose gathered keys and values make them the
    dearer kind; int64[buckets]."""
    tokens = np.tile(buckets * problem.layout.cp, len(codes))
    columns = whole_document_columns([[index] for index in range(len(tokens))], tokens)
    policy = np.repeat(codes, len(buckets))
    held = pipeline_bytes(problem.costs.model, problem.layout, columns, columns, tokens, policy)
    temporary = np.maximum(held.forward_temp_bytes, held.backward_temp_bytes)
    peak = (held.static_bytes + held.forward_kept_bytes + temporary).max(axis=1)
    return peak.reshape(len(codes), len(buckets)).max(axis=0)


def _price(problem: StepProblem, step: MicroBatch, dealt: list[Groups]) -> list[_Priced]:
    """Owners, seconds and bytes of all replicas at once: numpy's price is by the call."""
    costs, num_tokens, policy = problem.costs, problem.num_tokens, problem.policy
    groups = [group for of_replica in dealt for group in of_replica]
    owned = assign_groups(step, groups, backend=problem.options.backend)
    assert np.isfinite(owned.seconds).all(), "GDS deals only micro-batches that DACP finds owners for"
    columns = whole_document_columns(groups, num_tokens)
    columns = dataclasses.replace(columns, cp=np.where(owned.owner == SHARED, problem.layout.cp, 1))
    seconds = [_seconds(costs, columns, owned.owner, direction, policy) for direction in ("forward", "backward")]
    owners = (owned.owner, owned.owner)
    held = owned_pipeline_bytes(costs.model, costs.layout, columns, columns, num_tokens, policy, owners)
    edges = np.cumsum([0, *map(len, dealt)]).tolist()
    found = []
    for low, high in itertools.pairwise(edges):
        rows = {
            field.name: getattr(held, field.name)[low:high]
            for field in dataclasses.fields(held)
            if field.name != "static_bytes"
        }
        owner = owned.owner[columns.pack_offset[low] : columns.pack_offset[high]]
        bytes_ = dataclasses.replace(held, **rows)
        found.append(_Priced(owner, seconds[0][low:high], seconds[1][low:high], bytes_))
    return found


def _choice(problem: StepProblem, groups: Groups, priced: _Priced) -> ReplicaChoice:
    documents = np.array(sorted(itertools.chain.from_iterable(groups)), np.int64)
    num_tokens, policy = problem.num_tokens[documents], problem.policy_of(documents)
    costs, cp = problem.costs, problem.layout.cp
    if not groups:
        empty = whole_document_columns([], num_tokens)
        return ReplicaChoice(
            documents,
            one_f_one_b_candidate("no documents", empty, num_tokens, costs, problem.cap_bytes, problem.options, policy),
        )
    place = dict(zip(documents.tolist(), range(len(documents)), strict=True))
    columns = whole_document_columns([[place[document] for document in group] for group in groups], num_tokens)
    columns = dataclasses.replace(columns, cp=np.where(priced.owner == SHARED, cp, 1))
    tasks = PipelineTasks(
        forward_s=priced.forward_s,
        backward_s=priced.backward_s,
        p2p_forward_s=np.zeros(len(groups)),
        p2p_backward_s=np.zeros(len(groups)),
        forwards_needed=forwards_needed(columns, columns, num_tokens),
        stage_to_rank=np.array(costs.layout.stage_to_rank, np.int32),
        **dataclasses.asdict(priced.held),
    )
    shared = int((priced.owner == SHARED).sum())
    label = f"{len(groups)} micro-batches, {shared} of {len(documents)} documents shared"
    found = candidate(label, columns, columns, tasks, one_f_one_b(tasks), problem.cap_bytes, problem.options, policy)
    if cp > 1:
        found = dataclasses.replace(found, sharding=owned_sharding(columns, priced.owner))
    return ReplicaChoice(documents, found)


def _gather_seconds(costs: PackCosts, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Transfers of every document's keys and values, forward and backward, were it shared."""
    alone = whole_document_columns([[index] for index in range(len(num_tokens))], num_tokens)
    return sum(costs.context_seconds(alone, direction).sum(axis=1) for direction in ("forward", "backward"))  # type: ignore[return-value]


def _seconds(
    costs: PackCosts,
    columns: SliceColumns,
    owner: NDArray[np.int64],
    direction: Direction,
    policy: NDArray[np.int8] | None,
) -> NDArray[np.float64]:
    """Of every micro-batch on its slowest rank (eq. 2); float64[num_packs, 1]."""
    shared = columns.dealt(owner == SHARED, columns.pack_of_slice(), columns.num_packs)
    cp, local = costs.layout.cp, owner != SHARED
    locals_ = columns.dealt(local, columns.pack_of_slice() * cp + np.where(local, owner, 0), columns.num_packs * cp)
    gather_s = costs.context_seconds(shared, direction)
    waiting_s = costs.pack_seconds(shared, direction) - costs.compute_seconds(shared, direction)
    shared_s = costs.pack_seconds(shared, direction, policy) - waiting_s
    local_s = costs.pack_seconds(locals_, direction, policy).reshape(columns.num_packs, cp).max(axis=1)[:, None]
    # Matrix products of local and shared tokens run together, so the constant of a pack is paid once.
    once_s = costs.compute_seconds(columns.dealt(np.zeros(len(owner), bool), columns.pack_of_slice(), 1), direction)
    return np.maximum(gather_s, local_s) + shared_s - once_s
