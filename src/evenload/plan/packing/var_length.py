"""Greedy variable-length packing of whole documents, the inner loop of WLB's Algorithm 1.

Each document, in the order given, goes to the group of least work; where that would exceed the token limit to the
group with the fewest tokens; where that would too it is left over. Equal groups by the lowest index. O(n log groups).
"""

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.errors import ConfigError

LEFT_OVER = -1
"""Group of a document that found no room."""
NO_LIMIT = 2**62
"""Tokens that no group reaches."""


def pack_greedily(
    work_s: NDArray[np.float64],
    num_tokens: NDArray[np.int64],
    num_groups: int,
    capacity: int | None,
) -> NDArray[np.int64]:
    """The group of every document.

    Args:
        work_s: float64[n] in the order of placement, W_a + W_l of every document in seconds, finite, not negative.
        num_tokens: int64[n], at least 1 each.
        num_groups: at least 1.
        capacity: most tokens of a group (`<=`); None = no limit.

    Returns:
        int64[n], 0 .. num_groups - 1 or `LEFT_OVER`; some groups may stay empty.

    Raises:
        ConfigError: columns of different lengths, a bad work, length or group count.
    """
    work = np.ascontiguousarray(work_s, np.float64)
    sizes = np.ascontiguousarray(num_tokens, np.int64)
    if work.ndim != 1 or work.shape != sizes.shape:
        raise ConfigError(f"pack_greedily: work_s of shape {work.shape} and num_tokens {sizes.shape} must be columns")
    if num_groups < 1:
        raise ConfigError(f"pack_greedily: num_groups is {num_groups}, must be at least 1")
    if len(work) and not (np.isfinite(work).all() and work.min() >= 0 and sizes.min() >= 1):
        raise ConfigError(
            f"pack_greedily: works {work.min()} .. {work.max()} must be finite and not negative, "
            f"the shortest length {sizes.min()} at least 1"
        )
    limit = NO_LIMIT if capacity is None else capacity
    return _native.pack_greedily(work, sizes, num_groups, limit)


def members_of(group_of: NDArray[np.int64], items: NDArray[np.int64], num_groups: int) -> list[list[int]]:
    """Per group of `pack_greedily` its items in the order of placement; items left over are in none."""
    placed = group_of != LEFT_OVER
    by_group = np.argsort(group_of[placed], kind="stable")
    members = items[placed][by_group].tolist()
    edges = [0, *np.cumsum(np.bincount(group_of[placed], minlength=num_groups)).tolist()]
    return [members[edges[group] : edges[group + 1]] for group in range(num_groups)]
