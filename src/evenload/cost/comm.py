"""Seconds of transfers: bytes / bandwidth + latency (`docs/architecture.md`).

Rings move `(n-1)/n` of the bytes over every link in `n-1` steps. What hides behind compute is the caller's
business: P2P between stages is an edge delay in the simulator, so it hides there where the schedule lets it;
the gradient reduction is charged in full after the last backward (the runtime starts it there).
"""

from evenload.cost.coefficients import CostCoefficients


def ring_seconds(num_bytes: float, group_size: int, bandwidth_bytes_per_s: float, latency_s: float) -> float:
    """A reduce-scatter or an all-gather of `num_bytes` (whole buffer) over a ring; 0 for one rank."""
    if group_size == 1:
        return 0.0
    steps = group_size - 1
    return num_bytes * steps / group_size / bandwidth_bytes_per_s + steps * latency_s


def reduction_ring_seconds(num_bytes: float, copies: int, coefficients: CostCoefficients) -> float:
    """As `ring_seconds`, over the ranks that hold copies of the same weights.

    Raises:
        ConfigError: there are several copies and the coefficients know no link between them.
    """
    if copies == 1:
        return 0.0
    link = coefficients.reduce_link()
    return ring_seconds(num_bytes, copies, link.bandwidth_bytes_per_s, link.latency_s)
