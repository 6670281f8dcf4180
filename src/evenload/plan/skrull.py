"""`skrull`: global data scheduling and distributed-aware context parallelism, without a pipeline (Skrull §4).

    1. documents to replicas by forward + backward time (Algorithm 2, line 1)
    2. bucket: tokens that one rank may hold, from the memory model; exact where Skrull fits a line (C.1)
    3. per replica, documents ascending, n micro-batches `Subset[j::n]`, which pairs long and short; n from
       ceil(tokens / (bucket · cp)) upwards until every micro-batch holds at most bucket · cp tokens (eq. 10) and
       DACP finds owners within the bucket (eq. 7): `plan.dacp`. The first n that works is kept.
       Where a document fills more than half of what a micro-batch may hold, such documents are also dealt apart from
       the others and the faster answer is kept: paired, they would force n up to one document a micro-batch.

Right reading of Algorithm 2 (oracle §5): as printed it never stops on success, its slices repeat documents and a
failure skips a micro-batch instead of starting anew. Here n ends at one document a micro-batch; where even that
does not fit, the step is planned with the least bucket that can hold it and reported as beyond memory.

A micro-batch costs `max(transfers, local) + shared` on its slowest rank (eq. 2), forward and backward each. Replicas
wait for each other at the end of the step only. O(n · documents · cp) per tried n.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import pipeline_bytes
from evenload.cost.owned_bytes import owned_pipeline_bytes, owned_sharding
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.plan.candidate import Candidate, candidate, forwards_needed, one_f_one_b_candidate
from evenload.plan.dacp import SHARED, MicroBatch, assign_owners, fits, rank_seconds
from evenload.plan.dp_balance import assign_replicas
from evenload.plan.problem import ReplicaChoice, StepProblem
from evenload.schedule.one_f_one_b import one_f_one_b
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.micropack import Direction
from evenload.types.pipeline import PipelineTasks

MicroBatchOwners = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Documents of a micro-batch and the owner of each."""


def plan_skrull(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    """One choice per replica.

    Raises:
        ConfigError: a layout with a pipeline.
        DataError: a document longer than `max_pack_tokens`.
    """
    if problem.layout.num_stages > 1:
        raise ConfigError(
            f"strategy skrull: layout {problem.layout.describe()} has a pipeline and Skrull has none; "
            "use pp=1 (with cp for long documents), or slimpack"
        )
    problem.require_whole_documents_fit("skrull")
    replicas = assign_replicas(problem.document_s, problem.layout.dp, backend=problem.options.backend)
    bucket = bucket_tokens(problem)
    return tuple(ReplicaChoice(documents, _replica(problem, documents, bucket)) for documents in replicas)


def bucket_tokens(problem: StepProblem) -> int:
    """Tokens one rank may hold in a micro-batch, local or its share of longer documents (Skrull's C); 0 where
    nothing fits, and all tokens of the step where memory has no limit."""
    most = max(1, int(problem.num_tokens.sum()))
    if problem.cap_bytes is None:
        return most
    codes = [0] if problem.policy is None else np.unique(problem.policy).tolist()
    return min(_largest_bucket(problem, code, most) for code in codes)


def _largest_bucket(problem: StepProblem, code: int, most: int) -> int:
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _peak_bytes(problem, middle, code) <= int(problem.cap_bytes.min()):  # type: ignore[union-attr]
            low = middle
        else:
            high = middle - 1
    return low


def _peak_bytes(problem: StepProblem, bucket: int, code: int) -> int:
    """With the bucket full of shared tokens, whose gathered keys and values make them the dearer kind."""
    tokens = np.array([bucket * problem.layout.cp], np.int64)
    columns = whole_document_columns([[0]], tokens)
    held = pipeline_bytes(problem.costs.model, problem.layout, columns, columns, tokens, np.array([code], np.int8))
    temporary = np.maximum(held.forward_temp_bytes, held.backward_temp_bytes)
    return int((held.static_bytes + held.forward_kept_bytes[0] + temporary[0]).max())


def _replica(problem: StepProblem, documents: NDArray[np.int64], bucket: int) -> Candidate:
    num_tokens, policy = problem.num_tokens[documents], problem.policy_of(documents)
    if not len(documents):
        empty = whole_document_columns([], num_tokens)
        return one_f_one_b_candidate(
            "no documents", empty, num_tokens, problem.costs, problem.cap_bytes, problem.options, policy
        )
    batches = _micro_batches(problem, num_tokens, policy, bucket)
    if batches is None:
        bucket = max(bucket, -(-int(num_tokens.max()) // problem.layout.cp))
        batches = _micro_batches(problem, num_tokens, policy, bucket)
        assert batches is not None, "a document of its own fits a bucket of its share"
    columns = whole_document_columns([group.tolist() for group, _ in batches], num_tokens)
    owner = np.concatenate([owners for _, owners in batches])
    columns = dataclasses.replace(columns, cp=np.where(owner == SHARED, problem.layout.cp, 1))
    tasks = _tasks(problem.costs, columns, owner, num_tokens, policy)
    label = f"{len(batches)} micro-batches, {int((owner == SHARED).sum())} of {len(owner)} documents shared"
    found = candidate(label, columns, columns, tasks, one_f_one_b(tasks), problem.cap_bytes, problem.options, policy)
    return found if problem.layout.cp == 1 else dataclasses.replace(found, sharding=owned_sharding(columns, owner))


def _micro_batches(
    problem: StepProblem, num_tokens: NDArray[np.int64], policy: NDArray[np.int8] | None, bucket: int
) -> list[MicroBatchOwners] | None:
    """The faster of both readings; None where neither finds micro-batches."""
    costs, cp = problem.costs, problem.layout.cp
    limit = bucket * cp
    if problem.options.max_pack_tokens is not None:
        limit = min(limit, problem.options.max_pack_tokens)
    if num_tokens.max() > limit:
        return None
    step = MicroBatch(
        num_tokens,
        costs.document_seconds(num_tokens, policy, ranks=1),
        costs.document_seconds(num_tokens, policy),
        _gather_seconds(costs, num_tokens),
        cp,
        bucket,
    )
    ascending = np.argsort(num_tokens, kind="stable")
    long = num_tokens[ascending] > limit / 2
    apart = None
    if long.any():
        alone, paired = (_first_success(step, part, limit, len(part)) for part in (ascending[long], ascending[~long]))
        apart = None if alone is None or paired is None else alone + paired
    # Twice as many micro-batches are not faster, only dear to try.
    most = len(ascending) if apart is None else 2 * len(apart)
    found = [batches for batches in (_first_success(step, ascending, limit, most), apart) if batches is not None]
    return min(found, key=lambda batches: _total_seconds(step, batches)) if found else None


def _first_success(
    step: MicroBatch, ascending: NDArray[np.int64], limit: int, most: int
) -> list[MicroBatchOwners] | None:
    """Algorithm 2 for some documents: the least n, up to `most`, whose micro-batches all fit."""
    tokens = step.num_tokens[ascending]
    if not len(tokens):
        return []
    for count in range(-(-int(tokens.sum()) // limit), min(most, len(tokens)) + 1):
        rows = np.zeros(-(-len(tokens) // count) * count, np.int64)
        rows[: len(tokens)] = tokens
        if rows.reshape(-1, count).sum(axis=0).max() > limit:
            continue
        groups = [ascending[first::count] for first in range(count)]
        if not all(fits(step.chosen(group)) for group in groups):
            continue
        owners = [assign_owners(step.chosen(group)) for group in groups]
        return [(group, found) for group, found in zip(groups, owners, strict=True) if found is not None]
    return None


def _total_seconds(step: MicroBatch, batches: list[MicroBatchOwners]) -> float:
    return sum(float(rank_seconds(step.chosen(group), owners).max()) for group, owners in batches)


def _gather_seconds(costs: PackCosts, num_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Transfers of every document's keys and values, forward and backward, were it shared."""
    alone = whole_document_columns([[index] for index in range(len(num_tokens))], num_tokens)
    return sum(costs.context_seconds(alone, direction).sum(axis=1) for direction in ("forward", "backward"))  # type: ignore[return-value]


def _tasks(
    costs: PackCosts,
    columns: SliceColumns,
    owner: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8] | None,
) -> PipelineTasks:
    held = owned_pipeline_bytes(costs.model, costs.layout, columns, columns, num_tokens, policy, (owner, owner))
    return PipelineTasks(
        forward_s=_seconds(costs, columns, owner, "forward", policy),
        backward_s=_seconds(costs, columns, owner, "backward", policy),
        p2p_forward_s=np.zeros(columns.num_packs),
        p2p_backward_s=np.zeros(columns.num_packs),
        forwards_needed=forwards_needed(columns, columns, num_tokens),
        stage_to_rank=np.array(costs.layout.stage_to_rank, np.int32),
        **dataclasses.asdict(held),
    )


def _seconds(
    costs: PackCosts,
    columns: SliceColumns,
    owner: NDArray[np.int64],
    direction: Direction,
    policy: NDArray[np.int8] | None,
) -> NDArray[np.float64]:
    """Of every micro-batch on its slowest rank (eq. 2); float64[num_packs, 1]."""
    shared = _chosen(columns, owner == SHARED, columns.num_packs, columns.pack_of_slice())
    cp, local = costs.layout.cp, owner != SHARED
    locals_ = _chosen(columns, local, columns.num_packs * cp, columns.pack_of_slice() * cp + np.where(local, owner, 0))
    gather_s = costs.context_seconds(shared, direction)
    waiting_s = costs.pack_seconds(shared, direction) - costs.compute_seconds(shared, direction)
    shared_s = costs.pack_seconds(shared, direction, policy) - waiting_s
    local_s = costs.pack_seconds(locals_, direction, policy).reshape(columns.num_packs, cp).max(axis=1)[:, None]
    # Matrix products of local and shared tokens run together, so the constant of a pack is paid once.
    once_s = costs.compute_seconds(_chosen(columns, np.zeros(len(owner), bool), 1, columns.pack_of_slice()), direction)
    return np.maximum(gather_s, local_s) + shared_s - once_s


def _chosen(columns: SliceColumns, chosen: NDArray[np.bool_], num_packs: int, pack: NDArray[np.int64]) -> SliceColumns:
    """Some slices, dealt into packs anew."""
    assert columns.cp is not None, "every slice says how many ranks share it"
    order = np.flatnonzero(chosen)[np.argsort(pack[chosen], kind="stable")]
    counts = np.bincount(pack[chosen], minlength=num_packs)
    return SliceColumns(
        doc=columns.doc[order],
        start=columns.start[order],
        stop=columns.stop[order],
        pack_offset=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pad_to=np.zeros(num_packs, np.int64),
        cp=columns.cp[order],
    )
