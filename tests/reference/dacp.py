"""`native/dacp.cpp` as plain Python: the specification, which decides by the same bits; and eq. 2 and 7 of its answer.

Sums are taken in the same order in both, so no rounding differs.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenload.planning.strategies.skrull import SHARED, MicroBatch

CEILINGS = 32
FASTER = 1 - 1e-9
"""By more than rounding."""


def chosen(step: MicroBatch, documents: Sequence[int]) -> MicroBatch:
    """Some of the documents."""
    of = np.array(documents, np.int64)
    columns = (step.num_tokens[of], step.local_s[of], step.shared_s[of], step.gather_s[of])
    return MicroBatch(*columns, step.cp, step.bucket_tokens)


def rank_seconds(batch: MicroBatch, owner: NDArray[np.int64]) -> NDArray[np.float64]:
    """Time of every rank (eq. 2); float64[cp]."""

    def sums(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        # Of the shared, then of each rank.
        return np.bincount(owner - SHARED, weights=weights, minlength=batch.cp + 1).astype(np.float64)

    gather_s, shared_s = sums(batch.gather_s)[0], sums(batch.shared_s)[0]
    return np.maximum(gather_s, sums(batch.local_s)[1:]) + shared_s


def rank_tokens(batch: MicroBatch, owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens every rank holds (eq. 7); int64[cp]."""
    local = owner != SHARED
    held = np.bincount(owner[local], weights=batch.num_tokens[local], minlength=batch.cp).astype(np.int64)
    return held + batch.share_tokens()[~local].sum()


def owners(batch: MicroBatch) -> NDArray[np.int64] | None:
    """The fastest of Algorithm 1 and of sharing above each ceiling; None where Algorithm 1 finds none that fit."""
    if batch.num_tokens.sum() > batch.bucket_tokens * batch.cp:
        return None
    best = algorithm_1(batch)
    if best is None:
        return None
    highest_s = best_s = float(rank_seconds(batch, best).max())
    for step in range(CEILINGS, -1, -1):
        owner = share_above(batch, highest_s * step / CEILINGS)
        if owner is not None and (time_s := float(rank_seconds(batch, owner).max())) < best_s * FASTER:
            best, best_s = owner, time_s
    return best


def algorithm_1(batch: MicroBatch) -> NDArray[np.int64] | None:
    """Skrull's Algorithm 1 with the repaired roll-back; None where even that makes no room."""
    tokens, shares, ranks = batch.num_tokens.tolist(), batch.share_tokens().tolist(), range(batch.cp)
    room, load_s = [batch.bucket_tokens] * batch.cp, [0.0] * batch.cp
    local: list[list[int]] = [[] for _ in ranks]  # ascending length, so the last is the largest
    owner = np.full(len(tokens), SHARED, np.int64)

    def share(document: int) -> None:
        owner[document] = SHARED
        for rank in ranks:
            room[rank] -= shares[document]
            load_s[rank] += batch.shared_s[document]

    for document in sorted(range(len(tokens)), key=tokens.__getitem__):
        while True:
            rank = min(ranks, key=load_s.__getitem__)
            if room[rank] < tokens[document]:
                rank = max(ranks, key=room.__getitem__)
            if room[rank] >= tokens[document]:
                owner[document] = rank
                local[rank].append(document)
                room[rank] -= tokens[document]
                load_s[rank] += batch.local_s[document]
                break
            if min(room) >= shares[document]:
                share(document)
                break
            overfull = True
            while overfull:  # the first round makes room, the others repair what its share broke
                rank = min(ranks, key=room.__getitem__)
                if not local[rank]:
                    return None
                given_up = local[rank].pop()
                room[rank] += tokens[given_up]
                load_s[rank] -= batch.local_s[given_up]
                share(given_up)
                overfull = min(room) < 0
    return owner


def share_above(batch: MicroBatch, ceiling_s: float) -> NDArray[np.int64] | None:
    """Longest first, whole on the least loaded rank that has room, shared where that would pass the ceiling."""
    tokens, shares = batch.num_tokens.tolist(), batch.share_tokens().tolist()
    room, load_s = [batch.bucket_tokens] * batch.cp, [0.0] * batch.cp
    owner = np.full(len(tokens), SHARED, np.int64)
    for document in sorted(range(len(tokens)), key=lambda index: -batch.local_s[index]):
        fitting = [rank for rank in range(batch.cp) if room[rank] >= tokens[document]]
        rank = min(fitting, key=load_s.__getitem__, default=SHARED)
        if rank != SHARED and load_s[rank] + batch.local_s[document] <= ceiling_s:
            owner[document] = rank
            room[rank] -= tokens[document]
            load_s[rank] += batch.local_s[document]
        elif min(room) >= shares[document]:
            room = [tokens - shares[document] for tokens in room]
        else:
            return None
    return owner


def least_seconds(batch: MicroBatch) -> float:
    """Over all owners, one by one; infinite where none fits."""
    count = len(batch.num_tokens)
    every = np.indices((batch.cp + 1,) * count).reshape(count, -1).T - 1
    is_shared = every == SHARED
    held = np.stack([(every == rank) @ batch.num_tokens for rank in range(batch.cp)])
    load_s = np.stack([(every == rank) @ batch.local_s for rank in range(batch.cp)])
    seconds = np.maximum(load_s.max(axis=0), is_shared @ batch.gather_s) + is_shared @ batch.shared_s
    fits = held.max(axis=0) + is_shared @ batch.share_tokens() <= batch.bucket_tokens
    return float(seconds[fits].min(initial=math.inf))
