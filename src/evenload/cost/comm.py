"""Seconds of transfers: bytes / bandwidth + latency (`docs/architecture.md`).

Rings move `(n-1)/n` of the bytes over every link in `n-1` steps. What hides behind compute is the caller's
business: P2P between stages is an edge delay in the simulator, so it hides there where the schedule lets it;
the gradient reduction is charged in full after the last backward (the runtime starts it there).
"""

from evenload.cost.coefficients import CostCoefficients


def reduction_ring_seconds(num_bytes: float, copies: int, coefficients: CostCoefficients) -> float:
    """A reduce-scatter or an all-gather of `num_bytes` (whole buffer) over the ranks that hold copies of the weights.

    Raises:
        ConfigError: there are several copies and the coefficients know no link between them.
    """
    if copies == 1:
        return 0.0
    link, steps = coefficients.reduce_link(), copies - 1
    return num_bytes * steps / copies / link.bandwidth_bytes_per_s + steps * link.latency_s
