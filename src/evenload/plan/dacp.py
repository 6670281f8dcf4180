"""DACP: which documents of a micro-batch stay whole on one rank, which are shared by all (Skrull §4.1, Algorithm 1).

Objective (eq. 1-2): the slowest rank's `max(transfers, local work) + shared work`; memory (eq. 7): no rank holds more
than a bucket of tokens, local documents plus its share of the others.

1. Algorithm 1, in ascending length: a document goes whole to the rank with the least work that has room, else to the
   emptiest, else it is shared. If even a share does not fit, *roll-back*: the fullest rank gives up its LARGEST local
   document, which is shared by ALL ranks, and again while any rank is overfull. The paper frees the smallest and books
   the share on one rank only; 20 % of random schedules then exceed a bucket (oracle §5). Every roll-back makes one
   local document shared for good, so this ends; it fails only when the fullest rank has no local document left.
2. The s longest shared and the others longest first, for every s while the time falls: "avoid sharding" alone leaves
   the longest document on one rank however much faster sharing it were.
3. Descent from the fastest of these: the best of all moves of one document to another rank or to all, and of all swaps
   of two owners, until none is faster.
4. Few documents: branch and bound, longest document first, from there.

Each step ends early once the time is within `GOOD_ENOUGH` of what no owners can beat, the mean of all ranks when every
document takes the cheaper of its two kinds. Price for n documents on cp ranks: O(n² cp) of 1 and 2, `evaluations` · cp
of 3, `nodes` · cp of 4. `Effort` bounds the last two, so a plan takes bounded time and is the same every time.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.plan.dacp_search import SHARED, GroupSearch
from evenload.types.backend import Backend


@dataclass(frozen=True)
class Effort:
    """How long to look for owners of one micro-batch.

    Args:
        evaluations: of neighbours in the descent; 0 = no descent.
        nodes: of branch and bound; 0 = none.
    """

    evaluations: int
    nodes: int


QUICK = Effort(0, 0)
"""To compare many micro-batches."""
USUAL = Effort(400, 0)
THOROUGH = Effort(20_000, 20_000)
"""For micro-batches that are kept."""


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

    def least_s(self) -> NDArray[np.float64]:
        """Seconds that each document adds at least to the mean rank; float64[n]."""
        return np.minimum(self.local_s / self.cp, self.shared_s)


@dataclass(frozen=True, eq=False)
class OwnedGroups:
    """Owners of the documents of several micro-batches.

    Args:
        owner: int64[documents], group after group; `SHARED` = all ranks. Meaningless in a group without an answer.
        seconds: float64[groups], eq. 2 on the slowest rank; infinite where no owners were found that fit.
        members: int64[documents], the document that each owner belongs to.
        offset: int64[groups + 1], where each group begins in `owner` and `members`.
    """

    owner: NDArray[np.int64]
    seconds: NDArray[np.float64]
    members: NDArray[np.int64]
    offset: NDArray[np.int64]

    def of_group(self, group: int) -> NDArray[np.int64]:
        """Owners of one group's documents."""
        return self.owner[self.offset[group] : self.offset[group + 1]]


def assign_groups(
    step: MicroBatch, groups: Sequence[Sequence[int]], effort: Effort = THOROUGH, *, backend: Backend = "native"
) -> OwnedGroups:
    """Owners for several micro-batches at once, each by itself.

    Args:
        step: columns of all documents.
        groups: document indices of every micro-batch.
    """
    offset = np.cumsum([0, *map(len, groups)]).astype(np.int64)
    members = np.fromiter(itertools.chain.from_iterable(groups), np.int64, int(offset[-1]))
    if backend == "native":
        owner, seconds = _native.assign_owners(
            step.num_tokens, step.local_s, step.shared_s, step.gather_s, members, offset,
            step.cp, step.bucket_tokens, effort.evaluations, effort.nodes,
        )  # fmt: skip
        return OwnedGroups(owner, seconds, members, offset)
    owners: list[int] = []
    times: list[float] = []
    for low, high in itertools.pairwise(offset.tolist()):
        group = step.chosen(members[low:high])
        search = GroupSearch(
            group.num_tokens.tolist(),
            group.local_s.tolist(),
            group.shared_s.tolist(),
            group.gather_s.tolist(),
            group.cp,
            group.bucket_tokens,
        )
        found = search.run(effort.evaluations, effort.nodes)
        owners += [SHARED] * (high - low) if found is None else found
        times.append(float("inf") if found is None else search.best_s)
    return OwnedGroups(np.array(owners, np.int64), np.array(times, np.float64), members, offset)


def assign_owners(
    batch: MicroBatch, effort: Effort = THOROUGH, *, backend: Backend = "native"
) -> NDArray[np.int64] | None:
    """Owner rank of every document, `SHARED` for all ranks; None where no answer was found that fits."""
    found = assign_groups(batch, [range(len(batch.num_tokens))], effort, backend=backend)
    return found.owner if np.isfinite(found.seconds[0]) else None


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
