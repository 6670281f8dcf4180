"""Which documents store, recompute or offload their activations (DESIGN §7, FlexPipe §5's memory options).

`choose` starts with `replay`, the fastest, and only where that does not fit memory tries, long documents first,
the levels below; the fastest that fits is kept, else the one that misses memory by the least. Long documents go
first because they alone decide the peak: their first backward waits for their last forward, however they are cut.

    recompute long      the longest documents, half of the tokens
    offload long        the same; long attention hides their copies
    recompute           all
    offload long, recompute short
    offload             all

A level is one policy column for the whole global batch, so every replica and every cut is planned under it.
O(n log n), at most six plans a step.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import OFFLOAD, POLICIES, RECOMPUTE, REPLAY
from evenload.plan.options import PolicyOption

LONG_SHARE = 0.5
"""Of the tokens: the longest documents that hold them count as long."""


def policy_levels(
    num_tokens: NDArray[np.int64], option: PolicyOption, *, can_offload: bool
) -> list[NDArray[np.int8] | None]:
    """Policy columns to try in order; int8[n] indices into `POLICIES`, None = all replay.

    Args:
        num_tokens: int64[n].
        can_offload: the link to the host is known; without it "choose" leaves offloading out.
    """
    if option != "choose":
        code = POLICIES.index(option)
        return [np.full(len(num_tokens), code, np.int8) if code else None]
    long = _long_documents(num_tokens)
    pairs = [
        (RECOMPUTE, REPLAY),
        (OFFLOAD, REPLAY),
        (RECOMPUTE, RECOMPUTE),
        (OFFLOAD, RECOMPUTE),
        (OFFLOAD, OFFLOAD),
    ]
    usable = [pair for pair in pairs if can_offload or OFFLOAD not in pair]
    return [None, *(np.where(long, of_long, of_short).astype(np.int8) for of_long, of_short in usable)]


def _long_documents(num_tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The longest documents that hold at least `LONG_SHARE` of the tokens; equal lengths in arrival order."""
    order = np.argsort(-num_tokens, kind="stable")
    before = np.cumsum(num_tokens[order]) - num_tokens[order]
    long = np.zeros(len(num_tokens), bool)
    long[order[before < LONG_SHARE * num_tokens.sum()]] = True
    return long
