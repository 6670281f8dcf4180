"""Which documents store, recompute or offload their activations (FlexPipe §5's memory options).

`choose` starts with `replay`, the fastest, and only where that does not fit memory tries, long documents first,
the policies below; the fastest that fits is kept, else the one that misses memory by the least. Long documents go
first because they alone decide the peak: their first backward waits for their last forward, however they are cut.

    offload the longest      documents that hold 1/4, 1/2, 3/4 of the tokens; long attention hides their copies
    recompute the longest    the same
    recompute all
    offload the longest half, recompute the others
    offload all

Each is one column for the whole global batch, so every replica and every cut is planned under it.
O(n log n), at most ten.

Where a plan's offloaded documents do not fit host memory, `policies_within_host` has what does: a node that lacks a
tenth of what offloading all would take should not recompute half of the batch.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import OFFLOAD, POLICIES, RECOMPUTE, REPLAY
from evenload.plan.problem.options import PolicyOption

LONG_SHARES = (0.25, 0.5, 0.75)
"""Of the tokens: the longest documents that hold them count as long."""


def policies_in_order(
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
    quarter, half, most = (_long_documents(num_tokens, share) for share in LONG_SHARES)
    shares = [
        *((long, OFFLOAD, REPLAY) for long in (quarter, half, most)),
        *((long, RECOMPUTE, REPLAY) for long in (quarter, half, most)),
        (half, RECOMPUTE, RECOMPUTE),
        (half, OFFLOAD, RECOMPUTE),
        (half, OFFLOAD, OFFLOAD),
    ]
    columns: list[NDArray[np.int8] | None] = [None]
    for long, of_long, of_short in shares:
        column = np.where(long, of_long, of_short).astype(np.int8)
        # One document may hold all shares: equal columns are one policy.
        is_new = not any(other is not None and (other == column).all() for other in columns)
        if is_new and (can_offload or OFFLOAD not in (of_long, of_short)):
            columns.append(column)
    return columns


def policies_within_host(
    num_tokens: NDArray[np.int64], policy: NDArray[np.int8], share: float
) -> list[NDArray[np.int8]]:
    """Policy columns for where the documents that `policy` offloads do not fit host memory: of these the longest, as
    many as hold at most `share` of their tokens, are offloaded, the others stored, or recomputed. Short documents are
    the cheapest to recompute, token by token.

    Returns:
        int8[n] each; none where the longest alone holds more, or all of them hold less.
    """
    offloaded = policy == OFFLOAD
    order = np.argsort(-num_tokens, kind="stable")
    order = order[offloaded[order]]
    held = np.cumsum(num_tokens[order]) <= share * num_tokens[offloaded].sum()
    if not held.any() or held.all():
        return []
    found = []
    for rest in (REPLAY, RECOMPUTE):
        column = np.where(offloaded, rest, policy).astype(np.int8)
        column[order[held]] = OFFLOAD
        found.append(column)
    return found


def _long_documents(num_tokens: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """The longest documents that hold at least this share of the tokens; equal lengths in arrival order."""
    order = np.argsort(-num_tokens, kind="stable")
    before = np.cumsum(num_tokens[order]) - num_tokens[order]
    long = np.zeros(len(num_tokens), bool)
    long[order[before < share * num_tokens.sum()]] = True
    return long
