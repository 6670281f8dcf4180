"""`WorkCurve`: seconds of a token range as a function of where it lies in its document.

Work of tokens `[a, b)` is `linear_s (b - a) + sum_i coef_i pairs_i(a, b) + slice_s`, where `pairs` counts
the (query, key) pairs of causal attention: `(b (b + 1) - a (a + 1)) / 2` for full attention and
`sum over t in [a, b) of min(t + 1, w)` for a sliding window of w tokens. Monotone in b and, for a range
that ends at a fixed b, in b - a; partitioners rely on it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.errors import ConfigError


def causal_pairs(start: ArrayLike, stop: ArrayLike, window: int = 0) -> NDArray[np.float64]:
    """(query, key) pairs of the queries `[start, stop)` of causal documents.

    Query t sees `min(t + 1, window)` keys; `window` 0 = all. Exact below 2**53.

    Args:
        start, stop: integers of equal shape, `0 <= start <= stop`.
    """
    return _pairs_below(np.asarray(stop, np.float64), window) - _pairs_below(np.asarray(start, np.float64), window)


def _pairs_below(tokens: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Pairs of the queries `[0, tokens)`."""
    if not window:
        return tokens * (tokens + 1) * 0.5
    inside = np.minimum(tokens, window)
    return inside * (inside + 1) * 0.5 + (tokens - inside) * window


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

    def slice_works_s(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of non-empty slices; start, stop: int64[n]; returns float64[n].

        The order of operations is part of the contract: the native core repeats it bit for bit.
        """
        work = self.linear_s * (stop - start).astype(np.float64)
        for coef, window in self.attention_s:
            work = work + coef * causal_pairs(start, stop, window)
        return work + self.slice_s
