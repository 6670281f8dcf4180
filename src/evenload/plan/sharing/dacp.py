"""DACP: which documents of a micro-batch stay whole on one rank, which are shared by all (Skrull §4.1, Algorithm 1).

Objective (eq. 1-2): the slowest rank's `max(transfers, local work) + shared work`; memory (eq. 7): no rank holds more
than a bucket of tokens, local documents plus its share of the others.

1. Algorithm 1, in ascending length: a document goes whole to the rank with the least work that has room, else to the
   emptiest, else it is shared. If even a share does not fit, *roll-back*: the fullest rank gives up its LARGEST local
   document, which is shared by ALL ranks, and again while any rank is overfull. The paper gives up the smallest and
   books the share on one rank only; 20 % of random schedules then exceed a bucket. Every roll-back makes one local
   document shared for good, so this ends; it fails only when the fullest rank has no local document left.
2. Ours: longest first, whole on the rank with the least work that has room, shared if that would keep the rank busy
   beyond a ceiling; for 33 ceilings from Algorithm 1's time down to nothing. "Avoid sharding" alone leaves the longest
   document on one rank however much faster sharing it were.

The fastest of all is kept. O(n · cp) for each ceiling, O(n² · cp) for roll-backs; native/dacp.cpp.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload import _native

SHARED = -1
"""Owner of a document that all ranks share."""


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

    def share_tokens(self) -> NDArray[np.int64]:
        """Tokens of one rank's share of every document, rounded up."""
        return -(-self.num_tokens // self.cp)


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


def assign_owners(step: MicroBatch, groups: Sequence[Sequence[int]], *, as_published: bool = False) -> OwnedGroups:
    """Owners for several micro-batches (document indices of each) at once; `as_published`: by Algorithm 1 alone."""
    offset = np.cumsum([0, *map(len, groups)]).astype(np.int64)
    members = np.fromiter(itertools.chain.from_iterable(groups), np.int64, int(offset[-1]))
    columns = (step.num_tokens, step.local_s, step.shared_s, step.gather_s)
    owner, seconds = _native.assign_owners(*columns, members, offset, step.cp, step.bucket_tokens, as_published)
    return OwnedGroups(owner, seconds, members, offset)
