"""The optimum of cutting documents into packs in a fixed order, without a solver."""

import numpy as np
from numpy.typing import NDArray

from evenload.types.columns import WorkCurve
from reference.slice_work import slice_work_s


def exact_slice_bound(
    num_tokens: NDArray[np.int64], order: NDArray[np.int64], work: WorkCurve, num_packs: int
) -> float:
    """Least possible work of the largest pack when documents are cut freely, in this order (int64[n]), into `num_packs`
    packs; seconds, to a relative 1e-9."""
    lengths = [int(num_tokens[index]) for index in order]
    high = sum(slice_work_s(work, 0, n) for n in lengths)
    if not high:
        return 0.0
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _packs_needed(lengths, work, middle, num_packs) <= num_packs:
            high = middle
        else:
            low = middle
    return high


def _packs_needed(lengths: list[int], work: WorkCurve, limit_s: float, stop_after: int) -> int:
    """Packs when each is filled to `limit_s`; `stop_after + 1` stands for "too many"."""
    packs, room_s = 1, limit_s
    for length in lengths:
        start = 0
        while start < length:
            stop = _furthest(work, start, length, room_s)
            if stop == start:
                packs += 1
                if room_s == limit_s or packs > stop_after:
                    return stop_after + 1  # not even one token fits an empty pack, or too many
                room_s = limit_s
                continue
            room_s -= slice_work_s(work, start, stop)
            start = stop
    return packs


def _furthest(work: WorkCurve, start: int, most: int, room_s: float) -> int:
    """Largest `stop <= most` whose slice fits `room_s`; `start` when none does."""
    low, high = start, most
    while low < high:
        middle = (low + high + 1) // 2
        if slice_work_s(work, start, middle) <= room_s:
            low = middle
        else:
            high = middle - 1
    return low
