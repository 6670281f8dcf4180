"""`profile_lengths`: quantiles, length classes and window cuts of document lengths, exactly.

Sums of squares leave int64 soon (ten documents of a billion tokens), so everything is summed over the different
lengths in Python's integers. Price: O(n log n) to sort, then a few operations for each different length.
"""

import itertools
from collections.abc import Sequence

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
    length, count = values.tolist(), counts.tolist()
    # Running totals over the different lengths, ascending; exact at any size.
    documents = list(itertools.accumulate(count))
    tokens = list(itertools.accumulate(n * c for n, c in zip(length, count, strict=True)))
    pairs = list(itertools.accumulate(_pairs(n) * c for n, c in zip(length, count, strict=True)))
    return LengthProfile(
        documents=documents[-1],
        tokens=tokens[-1],
        attention_pairs=pairs[-1],
        shortest=length[0],
        median=_quantile(length, documents, 1, 2),
        mean=tokens[-1] / documents[-1],
        p90=_quantile(length, documents, 9, 10),
        p99=_quantile(length, documents, 99, 100),
        longest=length[-1],
        half_of_tokens=_heaviest_half(length, count, tokens),
        half_of_attention=_heaviest_half(length, count, pairs),
        classes=_classes(values, documents, tokens, pairs),
        cumulative=_cumulative(values, documents, tokens, pairs),
        windows=tuple(_window_cut(window, length, count) for window in sorted(set(windows))),
    )


def require_windows(windows: Sequence[int]) -> None:
    """Refuse windows below 1 with a `ConfigError`: nothing fits them."""
    bad = [window for window in windows if window < 1]
    if bad:
        raise ConfigError(f"window is {bad[0]}, must be at least 1 token")


def _pairs(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2


def _quantile(length: list[int], documents: list[int], numerator: int, denominator: int) -> int:
    """The least length with `documents <= length` of at least numerator/denominator of all."""
    return next(n for n, d in zip(length, documents, strict=True) if d * denominator >= documents[-1] * numerator)


def _heaviest_half(length: list[int], count: list[int], running: list[int]) -> HeaviestHalf:
    total = running[-1]
    taken, num_documents = 0, 0
    for i in range(len(length) - 1, -1, -1):
        each = (running[i] - (running[i - 1] if i else 0)) // count[i]
        needed = -(-(total - 2 * taken) // (2 * each))  # documents of this length that reach half, rounded up
        if needed <= count[i]:
            return HeaviestHalf(documents=num_documents + needed, shortest=length[i])
        taken += each * count[i]
        num_documents += count[i]
    raise AssertionError("all documents together hold at least half of everything")


def _upto(values: NDArray[np.int64], running: list[int], bound: int) -> int:
    """Running total over lengths of at most `bound`."""
    position = int(np.searchsorted(values, bound, side="right"))
    return running[position - 1] if position else 0


def _classes(
    values: NDArray[np.int64], documents: list[int], tokens: list[int], pairs: list[int]
) -> tuple[LengthClass, ...]:
    first, last = int(values[0]).bit_length() - 1, int(values[-1]).bit_length() - 1
    result = []
    for k in range(first, last + 1):
        start, stop = 2**k, 2 ** (k + 1)
        inside = [_upto(values, run, stop - 1) - _upto(values, run, start - 1) for run in (documents, tokens, pairs)]
        result.append(
            LengthClass(start=start, stop=stop, documents=inside[0], tokens=inside[1], attention_pairs=inside[2])
        )
    return tuple(result)


def _cumulative(
    values: NDArray[np.int64], documents: list[int], tokens: list[int], pairs: list[int]
) -> tuple[LengthShare, ...]:
    shortest, longest = int(values[0]), int(values[-1])
    steps = np.arange(0, np.log2(longest / shortest), 1 / _CUMULATIVE_POINTS_PER_OCTAVE)
    bounds = sorted({*(int(shortest * 2**step) for step in steps.tolist()), shortest, longest})
    return tuple(
        LengthShare(
            length=bound,
            documents=_upto(values, documents, bound) / documents[-1],
            tokens=_upto(values, tokens, bound) / tokens[-1],
            attention_pairs=_upto(values, pairs, bound) / pairs[-1],
        )
        for bound in bounds
    )


def _window_cut(window: int, length: list[int], count: list[int]) -> WindowCut:
    longer = [(n, c) for n, c in zip(length, count, strict=True) if n > window]
    return WindowCut(
        window=window,
        longer_documents=sum(c for _, c in longer),
        longer_tokens=sum(n * c for n, c in longer),
        tokens_beyond=sum((n - window) * c for n, c in longer),
        attention_pairs_across=sum(
            (_pairs(n) - n // window * _pairs(window) - _pairs(n % window)) * c for n, c in longer
        ),
    )
