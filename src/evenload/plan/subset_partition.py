"""`best_partition`: items into groups and groups onto workers, by dynamic programming over subsets.

    f(S)   = min over T in S with S's first item:  cost(T) + f(S - T)                       the groups of one worker
    g_0(S) = load_0 + f(S),  g_r(S) = min over T in S:  max(load_r + f(T), g_{r-1}(S - T))  the slowest of r + 1 workers

Exact; O(workers · 3^n) for n items, below a millisecond for ten of them natively.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.types.backend import Backend


def best_partition(cost: NDArray[np.float64], load: Sequence[float], *, backend: Backend = "native") -> list[list[int]]:
    """The partition whose slowest worker has the least sum of its load and the costs of its groups.

    Args:
        cost: float64[2^n], of every subset as a bit mask, not negative, infinite where it is not allowed;
            `cost[0]` is 0.
        load: of every worker before; at least one.

    Returns:
        Per worker the subsets of its groups as bit masks; a worker may have none. A group of infinite cost comes back
        only where every partition has one.
    """
    found: list[list[int]] = [[] for _ in load]
    if backend == "native":
        groups, workers = _native.best_partition(cost, np.array(load, np.float64))
        for group, worker in zip(groups.tolist(), workers.tolist(), strict=True):
            found[worker].append(group)
        return found
    costs = cost.tolist()
    alone, group_of = _one_worker(costs)
    slowest = [load[0] + seconds for seconds in alone]
    chosen: list[list[int]] = []
    for own in load[1:]:
        slowest, parts = _one_more(alone, own, slowest)
        chosen.append(parts)
    left = len(costs) - 1
    for worker in range(len(load) - 1, -1, -1):
        mine = chosen[worker - 1][left] if worker else left
        left ^= mine
        while mine:
            found[worker].append(group_of[mine])
            mine ^= group_of[mine]
    return found


def _one_worker(cost: list[float]) -> tuple[list[float], list[int]]:
    alone, group_of = [0.0] * len(cost), [0] * len(cost)
    for items in range(1, len(cost)):
        first = items & -items
        best, group_of[items] = math.inf, first
        for others in _submasks(items ^ first):
            total = cost[first | others] + alone[items ^ first ^ others]
            if total < best:
                best, group_of[items] = total, first | others
        alone[items] = best
    return alone, group_of


def _one_more(alone: list[float], load: float, others: list[float]) -> tuple[list[float], list[int]]:
    best, chosen = [math.inf] * len(alone), [0] * len(alone)
    for items in range(len(alone)):
        for mine in _submasks(items):
            time_s = max(load + alone[mine], others[items ^ mine])
            if time_s < best[items]:
                best[items], chosen[items] = time_s, mine
    return best, chosen


def _submasks(items: int) -> Iterator[int]:
    """All subsets of the items, ascending, the empty one first."""
    mask = 0
    while True:
        yield mask
        mask = (mask - items) & items
        if not mask:
            return
