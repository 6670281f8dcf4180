"""The optimum of cutting documents into packs in a fixed order, without a solver."""

import math

import numpy as np
from numpy.typing import NDArray

from evenload.types.columns import WorkCurve
from reference.slice_work import slice_work_s


def exact_slice_bound(
    num_tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    work: WorkCurve,
    num_packs: int,
    *,
    max_pack_tokens: int | None = None,
) -> float:
    """Least possible work of the largest pack when documents are cut freely, in this order, into `num_packs` packs.

    Args:
        num_tokens: int64[n]; order: document indices as they are dealt.
        work: of a token range; a slice costs its constant.

    Returns:
        Seconds, to a relative 1e-9; infinite when the token limit does not allow `num_packs` packs.
    """
    lengths = [int(num_tokens[index]) for index in order]
    cap = sum(lengths) if max_pack_tokens is None else max_pack_tokens
    if sum(lengths) > cap * num_packs:
        return math.inf
    high = sum(slice_work_s(work, 0, n) for n in lengths)
    if not high:
        return 0.0
    low = 0.0
    # Cuts by the token limit alone may add slice constants, so the whole work in one pack is not always enough.
    while _packs_needed(lengths, work, high, cap, num_packs) > num_packs:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _packs_needed(lengths, work, middle, cap, num_packs) <= num_packs:
            high = middle
        else:
            low = middle
    return high


def _packs_needed(lengths: list[int], work: WorkCurve, limit_s: float, cap: int, stop_after: int) -> int:
    """Packs when each is filled to `limit_s` and `cap`; `stop_after + 1` stands for "too many"."""
    packs, room_s, room = 1, limit_s, cap
    for length in lengths:
        start = 0
        while start < length:
            stop = _furthest(work, start, min(length, start + room), room_s)
            if stop == start:
                if room == cap and room_s == limit_s:
                    return stop_after + 1  # not even one token fits an empty pack
                packs, room_s, room = packs + 1, limit_s, cap
                if packs > stop_after:
                    return packs
                continue
            room_s -= slice_work_s(work, start, stop)
            room -= stop - start
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
