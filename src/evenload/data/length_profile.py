"""`profile_lengths`: quantiles, length classes and window cuts of document lengths, exactly.

Sums of squares leave int64 soon (ten documents of a billion tokens), so everything is summed over the different
lengths in Python's integers. Price: O(n log n) to sort, then a few operations for each different length.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.types.length_profile import HeaviestHalf, LengthClass, LengthProfile, LengthShare, WindowCut

DEFAULT_WINDOWS = tuple(2**k for k in range(12, 21))
"""4K to 1M tokens."""
# Enough for a smooth curve at any zoom, and a page of a few hundred numbers.
_CUMULATIVE_POINTS_PER_OCTAVE = 16


def profile_lengths(lengths: NDArray[np.int64], windows: Sequence[int] = DEFAULT_WINDOWS) -> LengthProfile:
    """Describe lengths.

    Args:
        lengths: int64[n], at least 1 each and at least one of them (`read_lengths` checks that).
        windows: context windows in tokens, in any order; repeated ones count once.

    Raises:
        ConfigError: a window below 1, or lengths that are not as described.
    """
    require_windows(windows)
    if not len(lengths) or lengths.min() < 1:
        raise ConfigError("a length profile needs at least one document, and every document at least 1 token")
    values, counts = np.unique(lengths, return_counts=True)
    # Python's integers: exact at any size.
    length, count = values.astype(object), counts.astype(object)
    totals = np.stack([count, length * count, _pairs(length) * count], axis=1)
    # Documents, tokens and pairs of the lengths before each, and at the end of all.
    running = np.concatenate([np.zeros((1, 3), object), np.cumsum(totals, axis=0)])
    documents, tokens, pairs = running[-1]
    return LengthProfile(
        documents=documents,
        tokens=tokens,
        attention_pairs=pairs,
        shortest=length[0],
        median=_quantile(length, running, 1, 2),
        mean=tokens / documents,
        p90=_quantile(length, running, 9, 10),
        p99=_quantile(length, running, 99, 100),
        longest=length[-1],
        half_of_tokens=_heaviest_half(length, count, length),
        half_of_attention=_heaviest_half(length, count, _pairs(length)),
        classes=_classes(values, running),
        cumulative=_cumulative(values, running),
        windows=tuple(_window_cut(window, length, count) for window in sorted(set(windows))),
    )


def require_windows(windows: Sequence[int]) -> None:
    """Refuse windows below 1 with a `ConfigError`: nothing fits them."""
    bad = [window for window in windows if window < 1]
    if bad:
        raise ConfigError(f"window is {bad[0]}, must be at least 1 token")


def _pairs(num_tokens: Any) -> Any:
    return num_tokens * (num_tokens + 1) // 2


def _quantile(length: NDArray[Any], running: NDArray[Any], numerator: int, denominator: int) -> int:
    """The least length with `documents <= length` of at least numerator/denominator of all."""
    return length[np.argmax(running[1:, 0] * denominator >= running[-1, 0] * numerator)]


def _heaviest_half(length: NDArray[Any], count: NDArray[Any], each: NDArray[Any]) -> HeaviestHalf:
    left, num_documents = (each * count).sum(), 0
    left -= left // 2
    for i in range(len(length) - 1, -1, -1):
        needed = -(-left // each[i])  # documents of this length that reach half, rounded up
        if needed <= count[i]:
            return HeaviestHalf(documents=num_documents + needed, shortest=length[i])
        left -= each[i] * count[i]
        num_documents += count[i]
    raise AssertionError("all documents together hold at least half of everything")


def _classes(values: NDArray[np.int64], running: NDArray[Any]) -> tuple[LengthClass, ...]:
    edges = [2**k for k in range(int(values[0]).bit_length() - 1, int(values[-1]).bit_length() + 1)]
    below = running[np.searchsorted(values, [edge - 1 for edge in edges], side="right")]
    return tuple(
        LengthClass(start=start, stop=stop, documents=documents, tokens=tokens, attention_pairs=pairs)
        for (start, stop), (documents, tokens, pairs) in zip(
            itertools.pairwise(edges), np.diff(below, axis=0), strict=True
        )
    )


def _cumulative(values: NDArray[np.int64], running: NDArray[Any]) -> tuple[LengthShare, ...]:
    shortest, longest = int(values[0]), int(values[-1])
    steps = np.arange(0, np.log2(longest / shortest), 1 / _CUMULATIVE_POINTS_PER_OCTAVE)
    bounds = sorted({*(int(shortest * 2**step) for step in steps.tolist()), shortest, longest})
    shares = running[np.searchsorted(values, bounds, side="right")] / running[-1]
    return tuple(
        LengthShare(length=bound, documents=documents, tokens=tokens, attention_pairs=pairs)
        for bound, (documents, tokens, pairs) in zip(bounds, shares, strict=True)
    )


def _window_cut(window: int, length: NDArray[Any], count: NDArray[Any]) -> WindowCut:
    is_longer = length > window
    length, count = length[is_longer], count[is_longer]
    across = _pairs(length) - length // window * _pairs(window) - _pairs(length % window)
    return WindowCut(
        window=window,
        longer_documents=count.sum(),
        longer_tokens=(length * count).sum(),
        tokens_beyond=((length - window) * count).sum(),
        attention_pairs_across=(across * count).sum(),
    )
