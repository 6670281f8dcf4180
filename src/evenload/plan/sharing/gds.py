"""GDS: the documents of a step into replicas and micro-batches, each micro-batch run by DACP (Skrull §4.2, eq. 8-11).

Objective: the slowest replica's sum over its micro-batches of `pack_s` + DACP's time; memory: a micro-batch holds at
most bucket · cp tokens (eq. 10, `limit_tokens`) and every rank at most a bucket (eq. 7).

1. Documents to replicas by time, longest first (Algorithm 2, line 1).
2. Per replica three ways to form micro-batches, of which the fastest is kept:
   interleaved     ascending, n micro-batches `Subset[j::n]`, which pairs long and short; the least n that fits.
                   The right reading of Algorithm 2: as printed it never stops on success, its slices repeat documents
                   and a failure skips a micro-batch instead of starting anew.
   longest first   by work into the fewest micro-batches that the tokens allow; ours
   consecutive     ascending, each filled before the next is begun: documents of one length balance whole on their
                   ranks, where pairing long and short would force them to be shared; ours
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.plan.packing.bin_packing import assign_replicas, longest_first
from evenload.plan.sharing.dacp import MicroBatch, assign_owners

Groups = list[list[int]]
"""Documents of every micro-batch."""


@dataclass(frozen=True, eq=False)
class StepDocuments:
    """The documents of a step as GDS sees them.

    Args:
        columns: of all documents of the step, with the bucket (`plan.sharing.dacp`).
        dp: replicas.
        limit_tokens: of a micro-batch.
        pack_s: constant of a micro-batch.
        as_published: Algorithms 1 and 2 alone.
    """

    columns: MicroBatch
    dp: int
    limit_tokens: int
    pack_s: float = 0.0
    as_published: bool = False

    def group_seconds(self, groups: Groups) -> NDArray[np.float64]:
        """Of every micro-batch, its constant included; infinite where it does not fit."""
        found = assign_owners(self.columns, groups, as_published=self.as_published)
        tokens = np.concatenate([[0], np.cumsum(self.columns.num_tokens[found.members])])[found.offset]
        return np.where(np.diff(tokens) > self.limit_tokens, np.inf, found.seconds + self.pack_s)


def assign_micro_batches(step: StepDocuments) -> list[Groups] | None:
    """Micro-batches of every replica; None where a document does not fit a micro-batch of its own.

    Every document lies in one micro-batch, none is empty; a replica may have none. Same input, same answer.
    """
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
    """Micro-batches that the tokens need."""
    return -(-int(step.columns.num_tokens[documents].sum()) // step.limit_tokens)


def _interleaved(step: StepDocuments, ascending: NDArray[np.int64]) -> Groups:
    """The fewest micro-batches `ascending[j::n]` that fit; at n documents each fits by itself."""
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
    groups = longest_first(
        step.columns.local_s[documents], _fewest(step, documents), num_tokens=shares, capacity=bucket
    )
    return [[listed[index] for index in group] for group in groups if group]


def _consecutive(step: StepDocuments, ascending: NDArray[np.int64]) -> Groups:
    shares, tokens = step.columns.share_tokens()[ascending].tolist(), step.columns.num_tokens[ascending].tolist()
    groups: Groups = [[]]
    room, room_tokens = step.columns.bucket_tokens, step.limit_tokens
    for document, share, count in zip(ascending.tolist(), shares, tokens, strict=True):
        if share > room or count > room_tokens:
            groups.append([])
            room, room_tokens = step.columns.bucket_tokens, step.limit_tokens
        groups[-1].append(document)
        room, room_tokens = room - share, room_tokens - count
    return groups
