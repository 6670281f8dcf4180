"""Greedy variable-length packing of whole documents, the inner loop of WLB's Algorithm 1.

Each document goes to the group of least work; where that would exceed the token limit to the group with the fewest
tokens; where that would too it is left over. O(n log groups), O(n · groups) when most groups are full.
"""

import heapq

import numpy as np
from numpy.typing import NDArray


def pack_greedily(
    work: NDArray[np.float64],
    num_tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    num_groups: int,
    capacity: int | None,
) -> tuple[list[list[int]], list[int]]:
    """Place documents in the order given.

    Args:
        work: float64[n], W_a + W_l of every document in seconds; num_tokens: int64[n].
        order: int64[k], indices to place.
        capacity: most tokens of a group (`<=`); None = no limit.

    Returns:
        `num_groups` groups of indices, some maybe empty; and the indices left over, in order.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    tokens = [0] * num_groups
    heap = [(0.0, group) for group in range(num_groups)]
    left_over: list[int] = []
    limit = int(num_tokens[order].sum()) if capacity is None else capacity
    for index, size, cost in zip(order.tolist(), num_tokens[order].tolist(), work[order].tolist(), strict=True):
        load, group = heap[0]
        if tokens[group] + size <= limit:
            heapq.heapreplace(heap, (load + cost, group))
        else:
            group = min(range(num_groups), key=tokens.__getitem__)
            if tokens[group] + size > limit:
                left_over.append(index)
                continue
            heap = [(load + cost * (other == group), other) for load, other in heap]
            heapq.heapify(heap)
        groups[group].append(index)
        tokens[group] += size
    return groups, left_over
