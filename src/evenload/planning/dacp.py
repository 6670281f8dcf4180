"""Schedule by Skrull's two levels: documents into micro-batches (GDS), and owners inside a micro-batch (DACP).

DACP (§4.1) decides which documents of a micro-batch stay whole on one rank and which all ranks share, so that the
slowest rank's `max(transfers, local work) + shared work` (eq. 1-2) is least and no rank holds more than a bucket (eq.
7). Algorithm 1 places documents in ascending length on the rank with the least work that can hold them, else the
emptiest, else shares them; if even a share does not fit, the fullest rank gives up its LARGEST local document to ALL
ranks, again while any is overfull (the paper gives up the smallest, to one rank only; schedules then exceed buckets).
Ours on top: longest first, shared if a document would keep its rank busy beyond a ceiling, for 33 ceilings from
Algorithm 1's time down to nothing. O(n · cp) for each ceiling, O(n² · cp) for roll-backs; native/dacp.cpp.

GDS (§4.2, eq. 8-11) minimises the slowest replica's sum of `pack_s` + DACP's time over its micro-batches, each of at
most bucket · cp tokens. Documents go to replicas by time, longest first; per replica the fastest of three ways is kept:

    interleaved     ascending, n micro-batches `Subset[j::n]`, which pairs long and short; the least n that fits (the
                    right reading of Algorithm 2, which as printed never stops on success)
    longest first   by work into the fewest micro-batches that the tokens allow; ours
    consecutive     ascending, each filled before the next is begun, so documents of one length stay whole; ours
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.planning.packing import assign_replicas, longest_first

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
