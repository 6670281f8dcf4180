"""Best-fit decreasing and longest first by their definitions, O(n · groups): the core must make the same groups."""

import numpy as np
from numpy.typing import NDArray

NO_LIMIT = 2**62


def best_fit_decreasing(num_tokens: NDArray[np.int64], capacity: int, max_items: int = NO_LIMIT) -> list[list[int]]:
    """As `evenload.planning.packing`, of documents that fit; a bin takes at most `max_items`."""
    bins: list[list[int]] = []
    free: list[int] = []
    for item in np.argsort(-num_tokens, kind="stable").tolist():
        size = int(num_tokens[item])
        fitting = (b for b in range(len(bins)) if free[b] >= size and len(bins[b]) < max_items)
        best = min(fitting, key=lambda b: (free[b], b), default=None)
        if best is None:
            best = len(bins)
            bins.append([])
            free.append(capacity)
        bins[best].append(item)
        free[best] -= size
    return bins


def longest_first(
    work_s: NDArray[np.float64],
    num_groups: int,
    *,
    num_tokens: NDArray[np.int64] | None = None,
    capacity: int | None = None,
    load_s: NDArray[np.float64] | None = None,
    max_items: int = NO_LIMIT,
) -> list[list[int]]:
    """As `evenload.planning.packing`."""
    sizes = [0] * len(work_s) if num_tokens is None else num_tokens.tolist()
    limit = 0 if capacity is None else capacity
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    load = [0.0] * num_groups if load_s is None else load_s.tolist()
    held = [0] * num_groups
    for item in np.argsort(-work_s, kind="stable").tolist():
        fitting = (g for g in range(len(groups)) if held[g] + sizes[item] <= limit and len(groups[g]) < max_items)
        best = min(fitting, key=lambda g: (load[g], g), default=None)
        if best is None:
            best = len(groups)
            groups.append([])
            load.append(0.0)
            held.append(0)
        groups[best].append(item)
        load[best] += float(work_s[item])
        held[best] += sizes[item]
    return groups
