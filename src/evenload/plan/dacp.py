"""DACP: which documents of a micro-batch stay whole on one rank, which are shared by all (Skrull §4.1, Algorithm 1).

Objective (eq. 1-2): the slowest rank's `max(transfers, local work) + shared work`; memory (eq. 7): no rank holds more
than a bucket of tokens, local documents plus its share of the others.

Algorithm 1, in ascending length: a document goes whole to the rank with the least work that has room, else to the
emptiest, else it is shared. If even a share does not fit, *roll-back*: the fullest rank gives up its LARGEST local
document, which is shared by ALL ranks, and again while any rank is overfull. The paper frees the smallest and books
the share on one rank only; 20 % of random schedules then exceed a bucket (oracle §5). Every roll-back makes one
local document shared for good, so this ends; it fails only when the fullest rank has no local document left.

Then two more kinds of answers are tried, because "avoid sharding" alone leaves the longest document on one rank
however much faster sharing it were: the s longest shared and the others longest first, for growing s. The fastest
that fits is kept, and for few documents improved by moves and swaps. O(n² log n) at worst for the n documents of a
micro-batch, a few dozen.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHARED = -1
"""Owner of a document that all ranks share."""
IMPROVED_DOCUMENTS = 8
"""Up to so many documents, moves of one and swaps of two are tried as well: with few, longest first is coarse."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The documents of one micro-batch as DACP sees them.

    Args:
        num_tokens: int64[n].
        local_s: float64[n], seconds of each document whole on one rank.
        shared_s: float64[n], seconds of one rank's share of it.
        gather_s: float64[n], transfers of its keys and values, if shared.
        cp: ranks.
        bucket_tokens: what a rank may hold.
    """

    num_tokens: NDArray[np.int64]
    local_s: NDArray[np.float64]
    shared_s: NDArray[np.float64]
    gather_s: NDArray[np.float64]
    cp: int
    bucket_tokens: int

    def chosen(self, documents: NDArray[np.int64]) -> "MicroBatch":
        """Some of the documents."""
        return MicroBatch(
            self.num_tokens[documents],
            self.local_s[documents],
            self.shared_s[documents],
            self.gather_s[documents],
            self.cp,
            self.bucket_tokens,
        )

    def share_tokens(self) -> NDArray[np.int64]:
        """Tokens of one rank's share of every document, rounded up."""
        return -(-self.num_tokens // self.cp)


def assign_owners(batch: MicroBatch) -> NDArray[np.int64] | None:
    """Owner rank of every document, `SHARED` for all ranks; None where no answer was found that fits."""
    found = [owner for owner in (_algorithm_1(batch), *_longest_shared(batch)) if owner is not None]
    found = [owner for owner in found if rank_tokens(batch, owner).max(initial=0) <= batch.bucket_tokens]
    if not found:
        return None
    best = min(found, key=lambda owner: float(rank_seconds(batch, owner).max(initial=0.0)))
    return _improved(batch, best) if len(best) <= IMPROVED_DOCUMENTS else best


def fits(batch: MicroBatch) -> bool:
    """Some owners keep to the bucket; cheap where Algorithm 1 finds them."""
    return _algorithm_1(batch) is not None or assign_owners(batch) is not None


def rank_tokens(batch: MicroBatch, owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens every rank holds (eq. 7); int64[cp]."""
    local = owner != SHARED
    held = np.bincount(owner[local], weights=batch.num_tokens[local], minlength=batch.cp).astype(np.int64)
    return held + batch.share_tokens()[~local].sum()


def rank_seconds(batch: MicroBatch, owner: NDArray[np.int64]) -> NDArray[np.float64]:
    """Time of every rank (eq. 2); float64[cp]."""
    local = owner != SHARED
    local_s = np.bincount(owner[local], weights=batch.local_s[local], minlength=batch.cp)
    return np.maximum(batch.gather_s[~local].sum(), local_s) + batch.shared_s[~local].sum()


def _algorithm_1(batch: MicroBatch) -> NDArray[np.int64] | None:
    ranks = range(batch.cp)
    tokens, shares = batch.num_tokens.tolist(), batch.share_tokens().tolist()
    local_s, shared_s = batch.local_s.tolist(), batch.shared_s.tolist()
    room, load_s = [batch.bucket_tokens] * batch.cp, [0.0] * batch.cp
    local: list[list[int]] = [[] for _ in ranks]  # ascending length, so the last is the largest
    owner = np.full(len(tokens), SHARED, np.int64)

    def share(document: int) -> None:
        owner[document] = SHARED
        for rank in ranks:
            room[rank] -= shares[document]
            load_s[rank] += shared_s[document]

    for document in sorted(range(len(tokens)), key=tokens.__getitem__):
        while True:
            rank = min(ranks, key=load_s.__getitem__)
            if room[rank] < tokens[document]:
                rank = max(ranks, key=room.__getitem__)
            if room[rank] >= tokens[document]:
                owner[document] = rank
                local[rank].append(document)
                room[rank] -= tokens[document]
                load_s[rank] += local_s[document]
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
                load_s[rank] -= local_s[given_up]
                share(given_up)
                overfull = min(room) < 0
    return owner


def _longest_shared(batch: MicroBatch) -> list[NDArray[np.int64]]:
    """The s longest shared, the rest longest first to the least work that has room; s grows while time falls."""
    order = np.argsort(-batch.local_s, kind="stable").tolist()
    tokens, local_s, shares = batch.num_tokens.tolist(), batch.local_s.tolist(), batch.share_tokens().tolist()
    found: list[NDArray[np.int64]] = []
    best_s, worse = float("inf"), 0
    room = batch.bucket_tokens
    for shared in range(len(order) + 1):
        if shared:
            room -= shares[order[shared - 1]]
        if room < 0 or worse > 2:
            break
        rest = order[shared:]
        owner = _longest_first(rest, tokens, local_s, batch.cp, room, len(tokens))
        if owner is None:  # balanced by tokens they may still fit
            owner = _longest_first(rest, tokens, [float(count) for count in tokens], batch.cp, room, len(tokens))
        if owner is None:
            continue
        time_s = float(rank_seconds(batch, owner).max())
        worse = 0 if time_s < best_s else worse + 1
        best_s = min(best_s, time_s)
        found.append(owner)
    return found


def _longest_first(
    order: list[int], tokens: list[int], local_s: list[float], cp: int, room: int, count: int
) -> NDArray[np.int64] | None:
    free, load_s = [room] * cp, [0.0] * cp
    owner = np.full(count, SHARED, np.int64)
    for document in order:
        fitting = [rank for rank in range(cp) if free[rank] >= tokens[document]]
        if not fitting:
            return None
        rank = min(fitting, key=load_s.__getitem__)
        owner[document] = rank
        free[rank] -= tokens[document]
        load_s[rank] += local_s[document]
    return owner


def _improved(batch: MicroBatch, owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """Descent: the best move of one document or swap of two, until none is faster within the bucket."""
    best_s = float(rank_seconds(batch, owner).max(initial=0.0))
    while True:
        better = None
        for other in _neighbours(owner, batch.cp):
            time_s = float(rank_seconds(batch, other).max())
            if time_s < best_s * (1 - 1e-9) and rank_tokens(batch, other).max() <= batch.bucket_tokens:
                best_s, better = time_s, other
        if better is None:
            return owner
        owner = better


def _neighbours(owner: NDArray[np.int64], cp: int) -> Iterator[NDArray[np.int64]]:
    for document in range(len(owner)):
        for rank in (SHARED, *range(cp)):
            if rank != owner[document]:
                moved = owner.copy()
                moved[document] = rank
                yield moved
    for first, second in itertools.combinations(range(len(owner)), 2):
        if owner[first] != owner[second]:
            swapped = owner.copy()
            swapped[[first, second]] = swapped[[second, first]]
            yield swapped
