"""Plan by `skrull`: global data scheduling and distributed-aware context parallelism, without a pipeline (Skrull §4).

A rank's bucket of tokens is set, or follows from the memory model (Skrull fits a line, C.1). A micro-batch costs
`max(transfers, local) + shared` on its slowest rank (eq. 2), forward and backward each. Where a document does not fit a
micro-batch of its own in memory, the step is planned with the least bucket that can hold it and reported as beyond it.

DACP (§4.1) decides which documents of a micro-batch stay whole on one rank and which all ranks share, so that the
slowest rank's time is least and no rank holds more than a bucket (eq. 7). Algorithm 1 places documents in ascending
length on the rank with the least work that can hold them, else the emptiest, else shares them; if even a share does not
fit, the fullest rank gives up its LARGEST local document to ALL ranks, again while any is overfull (the paper gives up
the smallest, to one rank only; schedules then exceed buckets). Ours on top: longest first, shared if a document would
keep its rank busy beyond a ceiling, for 33 ceilings from Algorithm 1's time down to nothing. O(n · cp) for each
ceiling, O(n² · cp) for roll-backs; native/dacp.cpp.

GDS (§4.2, eq. 8-11) minimises the slowest replica's sum of `pack_s` + DACP's time over its micro-batches, each of at
most bucket · cp tokens. Documents go to replicas by time, longest first; per replica the fastest of three ways is kept:

    interleaved     ascending, n micro-batches `Subset[j::n]`, which pairs long and short; the least n that fits (the
                    right reading of Algorithm 2, which as printed never stops on success)
    longest first   by work into the fewest micro-batches that the tokens allow; ours
    consecutive     ascending, each filled before the next is begun, so documents of one length stay whole; ours
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.memory import ReplicaPacks, pipeline_bytes
from evenload.cost.pack_pricing import rank_seconds
from evenload.errors import ConfigError
from evenload.planning.candidates import idle_candidate
from evenload.planning.packing import assign_replicas, longest_first
from evenload.planning.problem import ReplicaChoice, StepProblem, StrategyOptions
from evenload.planning.strategies.strategy import Strategy
from evenload.schedule.static_schedules import ONE_F_ONE_B
from evenload.stepplan.cp_rows import ranked_if_shared
from evenload.types.base import require_at_least_one
from evenload.types.columns import whole_document_columns
from evenload.types.document import Direction
from evenload.types.pipeline import PipelineTasks
from evenload.types.text import counted

SHARED = -1  # Owner of a document that all ranks share


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Hold documents for DACP: each document's tokens (int64[n]), seconds (float64[n]) whole on one rank, of one rank's
    share, and of its transfers if shared; and the tokens that a rank may hold."""

    num_tokens: NDArray[np.int64]
    local_s: NDArray[np.float64]
    shared_s: NDArray[np.float64]
    gather_s: NDArray[np.float64]
    cp: int
    bucket_tokens: int

    def share_tokens(self) -> NDArray[np.int64]:
        return -(-self.num_tokens // self.cp)


@dataclass(frozen=True, eq=False)
class OwnedGroups:
    """Hold owners of the documents of several micro-batches: `members` and `owner` (int64[documents], `SHARED` = all
    ranks) group after group from `offset` (int64[groups + 1]), and `seconds` (float64[groups], eq. 2 on the slowest
    rank), infinite where no owners were found that fit."""

    owner: NDArray[np.int64]
    seconds: NDArray[np.float64]
    members: NDArray[np.int64]
    offset: NDArray[np.int64]


def assign_owners(step: MicroBatch, groups: Sequence[Sequence[int]], *, as_published: bool = False) -> OwnedGroups:
    """Find owners for several micro-batches (document indices of each); `as_published`: by Algorithm 1 alone."""
    offset = np.cumsum([0, *map(len, groups)]).astype(np.int64)
    members = np.fromiter(itertools.chain.from_iterable(groups), np.int64, int(offset[-1]))
    columns = (step.num_tokens, step.local_s, step.shared_s, step.gather_s)
    owner, seconds = _native.assign_owners(*columns, members, offset, step.cp, step.bucket_tokens, as_published)
    return OwnedGroups(owner, seconds, members, offset)


Groups = list[list[int]]  # Documents of every micro-batch


@dataclass(frozen=True, eq=False)
class StepDocuments:
    """Hold the documents of a step for GDS; `limit_tokens` and the constant `pack_s` are of a micro-batch."""

    columns: MicroBatch
    dp: int
    limit_tokens: int
    pack_s: float = 0.0
    as_published: bool = False

    def group_seconds(self, groups: Groups) -> NDArray[np.float64]:
        """Price every micro-batch, its constant included; infinite where it does not fit."""
        result = assign_owners(self.columns, groups, as_published=self.as_published)
        tokens = np.concatenate([[0], np.cumsum(self.columns.num_tokens[result.members])])[result.offset]
        return np.where(np.diff(tokens) > self.limit_tokens, np.inf, result.seconds + self.pack_s)


def assign_micro_batches(step: StepDocuments) -> list[Groups] | None:
    """Form micro-batches of every replica, none empty; None where a document does not fit one of its own."""
    columns = step.columns
    if not len(columns.num_tokens):
        return [[] for _ in range(step.dp)]
    if columns.num_tokens.max() > step.limit_tokens or columns.share_tokens().max() > columns.bucket_tokens:
        return None
    return [_fastest(step, documents) for documents in assign_replicas(columns.shared_s, step.dp)]


def _fastest(step: StepDocuments, documents: NDArray[np.int64]) -> Groups:
    if not len(documents):
        return []
    ascending = documents[np.argsort(step.columns.num_tokens[documents], kind="stable")]
    if step.as_published:
        return _interleaved(step, ascending)
    ways = (_interleaved(step, ascending), _longest_first(step, ascending), _consecutive(step, ascending))
    return min(ways, key=lambda groups: float(step.group_seconds(groups).sum()))


def _fewest(step: StepDocuments, documents: NDArray[np.int64]) -> int:
    return -(-int(step.columns.num_tokens[documents].sum()) // step.limit_tokens)


def _interleaved(step: StepDocuments, ascending: NDArray[np.int64]) -> Groups:
    """Form the fewest micro-batches `ascending[j::n]` that fit; at n documents each fits by itself."""
    descending = step.columns.num_tokens[ascending][::-1]
    for count in range(_fewest(step, ascending), len(ascending)):
        # The micro-batch of the longest document has, position by position, the longest of every round.
        if descending[::count].sum() > step.limit_tokens:
            continue
        groups = [ascending[first::count].tolist() for first in range(count)]
        if np.isfinite(step.group_seconds(groups)).all():
            return groups
    return [[document] for document in ascending.tolist()]


def _longest_first(step: StepDocuments, documents: NDArray[np.int64]) -> Groups:
    shares, listed = step.columns.share_tokens()[documents], documents.tolist()
    # Shares rounded up under the bucket: all documents shared then fit.
    bucket = max(int(shares.max()), min(step.columns.bucket_tokens, step.limit_tokens // step.columns.cp))
    local_s, count = step.columns.local_s[documents], _fewest(step, documents)
    groups = longest_first(local_s, count, num_tokens=shares, capacity=bucket)
    return [[listed[index] for index in group] for group in groups if group]


def _consecutive(step: StepDocuments, ascending: NDArray[np.int64]) -> Groups:
    shares, tokens = step.columns.share_tokens()[ascending].tolist(), step.columns.num_tokens[ascending].tolist()
    groups: Groups = []
    left = left_tokens = -1
    for document, share, count in zip(ascending.tolist(), shares, tokens, strict=True):
        if share > left or count > left_tokens:
            groups.append([])
            left, left_tokens = step.columns.bucket_tokens, step.limit_tokens
        groups[-1].append(document)
        left, left_tokens = left - share, left_tokens - count
    return groups


_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
PUBLISHED_NOTE = "as published: Algorithms 1 and 2 alone"
BUCKETS_TRIED = 64  # Bucket sizes priced at once: four rounds find the largest of 2^24


class SkrullOptions(StrategyOptions, tag="skrull"):
    """Set what `skrull` tries.

    Args:
        as_published: Skrull's Algorithms 1 and 2 alone, with the repairs that they need to end within memory: documents
            interleaved into micro-batches, whole on a rank while one can hold them.
        bucket_tokens: most tokens that a rank holds in a micro-batch (BucketSize); None = as many as fit its memory.
    """

    as_published: bool = False
    bucket_tokens: int | None = None

    def __post_init__(self) -> None:
        require_at_least_one("plan options: skrull.", self, "bucket_tokens")


def plan_skrull(problem: StepProblem) -> tuple[ReplicaChoice, ...]:
    bucket = bucket_tokens(problem)
    step = step_documents(problem, bucket)
    replicas = assign_micro_batches(step)
    if replicas is None:
        step = step_documents(problem, int(step.columns.share_tokens().max()))
        replicas = assign_micro_batches(step)
        assert replicas is not None, "a document of its own fits a bucket of its share"
    return owned_choices(problem, step, replicas)


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
    """Count the tokens that one rank may hold in a micro-batch (Skrull's C): as set; 0 = nothing fits, without a limit
    the whole step's. A `ConfigError` where the longest document does not fit what is set."""
    own, cp = problem.options.own(SkrullOptions).bucket_tokens, problem.layout.cp
    if own is not None:
        longest = int(problem.num_tokens.max(initial=0))
        if longest > own * cp:
            raise ConfigError(
                f"plan options: skrull.bucket_tokens is {own}, so cp={cp} ranks hold {own * cp} tokens, and the "
                f"longest document has {longest}; set at least {-(-longest // cp)}, or leave it out"
            )
        return own
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


def owned_choices(problem: StepProblem, step: StepDocuments, replicas: list[Groups]) -> tuple[ReplicaChoice, ...]:
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
