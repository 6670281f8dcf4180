"""Seconds of transfers: bytes / bandwidth + latency (DESIGN §4).

Rings move `(n-1)/n` of the bytes over every link in `n-1` hops. What hides behind compute is the caller's
business: P2P between stages is an edge delay in the simulator, so it hides there where the schedule lets it;
the gradient reduction is charged in full after the last backward (the runtime starts it there).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenload.cost.coefficients import CostCoefficients


def transfer_seconds(num_bytes: ArrayLike, bandwidth_bytes_per_s: float, latency_s: float) -> NDArray[np.float64]:
    """One message over one link; float64, shape of `num_bytes`."""
    return np.asarray(num_bytes, np.float64) / bandwidth_bytes_per_s + latency_s


def ring_seconds(num_bytes: float, group_size: int, bandwidth_bytes_per_s: float, latency_s: float) -> float:
    """A reduce-scatter or an all-gather of `num_bytes` (whole buffer) over a ring; 0 for one rank."""
    if group_size == 1:
        return 0.0
    hops = group_size - 1
    return num_bytes * hops / group_size / bandwidth_bytes_per_s + hops * latency_s


def reduction_ring_seconds(num_bytes: float, copies: int, coefficients: CostCoefficients) -> float:
    """As `ring_seconds`, over the ranks that hold copies of the same weights.

    Raises:
        ConfigError: there are several copies and the coefficients know no link between them.
    """
    if copies == 1:
        return 0.0
    link = coefficients.reduce_link()
    return ring_seconds(num_bytes, copies, link.bandwidth_bytes_per_s, link.latency_s)
