"""`WorkCurve`: seconds of a token range as a function of where it lies in its document.

Work of tokens `[a, b)` is `linear_s (b - a) + sum_i coef_i pairs_i(a, b) + slice_s`, where `pairs` counts
the (query, key) pairs of causal attention: `(b (b + 1) - a (a + 1)) / 2` for full attention and
`sum over t in [a, b) of min(t + 1, w)` for a sliding window of w tokens. Monotone in b and, for a range
that ends at a fixed b, in b - a; partitioners rely on it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError


def prefix_pairs(num_tokens: int, window: int) -> int:
    """(query, key) pairs of the first `num_tokens` tokens under causal attention; window 0 = full."""
    if window == 0 or num_tokens <= window:
        return num_tokens * (num_tokens + 1) // 2
    return window * (window + 1) // 2 + (num_tokens - window) * window


@dataclass(frozen=True)
class WorkCurve:
    """Seconds of token ranges; non-negative coefficients.

    Args:
        linear_s: seconds a token.
        attention_s: (seconds a pair, window in tokens) terms; window 0 = full causal attention.
        slice_s: seconds every slice costs whatever its length.
    """

    linear_s: float
    attention_s: tuple[tuple[float, int], ...] = ()
    slice_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.linear_s, self.slice_s, *(coef for coef, _ in self.attention_s))
        if not all(0.0 <= number < float("inf") for number in numbers):
            raise ConfigError(f"work curve: {self} has a negative or non-finite coefficient")
        if any(window < 0 for _, window in self.attention_s):
            raise ConfigError(f"work curve: windows {[w for _, w in self.attention_s]} must be >= 0 (0 = full)")

    def slice_work_s(self, start: int, stop: int) -> float:
        """Seconds of the slice `[start, stop)`; 0 for an empty one.

        The order of operations is part of the contract: the native core repeats it bit for bit.
        """
        if stop == start:
            return 0.0
        work = self.linear_s * (stop - start)
        for coef, window in self.attention_s:
            work = work + coef * (prefix_pairs(stop, window) - prefix_pairs(start, window))
        return work + self.slice_s

    def slice_works_s(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.float64]:
        """`slice_work_s` of many non-empty slices; start, stop: int64[n]; returns float64[n] (same bits)."""
        start, stop = np.asarray(start, dtype=np.int64), np.asarray(stop, dtype=np.int64)
        work = self.linear_s * (stop - start).astype(np.float64)
        for coef, window in self.attention_s:
            work = work + coef * (_prefix_pairs_of(stop, window) - _prefix_pairs_of(start, window)).astype(np.float64)
        return work + self.slice_s


def _prefix_pairs_of(num_tokens: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    full = num_tokens * (num_tokens + 1) // 2
    if window == 0:
        return full
    return np.where(num_tokens <= window, full, window * (window + 1) // 2 + (num_tokens - window) * window)
