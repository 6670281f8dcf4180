"""`f[j]`: after how many forward packs the last stage runs backward pack j, the heart of a static schedule.

Any non-decreasing f with `D[j] <= f[j] <= m_f` gives a schedule without deadlock (docs/architecture.md). O(m_b).
"""

import numpy as np
from numpy.typing import NDArray


def catch_up_counts(forwards_needed: NDArray[np.int32]) -> NDArray[np.int64]:
    """The least f: the running maximum of D. Backwards run as early as they can, so memory is least.

    Args:
        forwards_needed: int32[m_b], D.
    """
    return np.maximum.accumulate(forwards_needed.astype(np.int64))


def keep_counts(forwards_needed: NDArray[np.int32], num_forward: int) -> NDArray[np.int64]:
    """At least one new forward pack per backward pack: `f[j] = min(m_f, max(D[j], f[j-1] + 1))`.

    PackFlow's injected forward MicroPack (SlimPack Fig. 9): the last stage stays one-forward-one-backward
    where a backward pack needs nothing new. Costs the memory of every injected pack.
    """
    # f[j] - j is the running maximum of D[j] - j; the cap commutes with it because D <= m_f.
    steps = np.arange(len(forwards_needed), dtype=np.int64)
    return np.minimum(num_forward, np.maximum.accumulate(forwards_needed.astype(np.int64) - steps) + steps)


def all_forward_counts(num_forward: int, num_backward: int) -> NDArray[np.int64]:
    """Every backward after every forward (GPipe)."""
    return np.full(num_backward, num_forward, dtype=np.int64)
