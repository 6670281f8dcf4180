"""Seconds of transfers inside tensor- and context-parallel groups, per layer.

Tensor parallelism with sequence parallelism (Korthikanti et al. 2022): a layer gathers its hidden states over tokens
before attention and before the feed-forward block and scatters sums after each: 4 rings forward; backward the same 4
for gradients and 2 more gathers for the weights' gradients. `tensor_exposed_share` of it (default half) does not hide
behind matrix products. A backward split into I and W makes those 6 in I; between them a rank keeps own rows only, so W
gathers the inputs of both blocks and the gradients of both outputs again: 4 more.

Context parallelism: K and V of a pack are all-gathered before attention, again in backward, and dK and dV are
reduce-scattered. Transfers hide behind `context_hidden_share` (default 0.8) of the pack's attention; the rest is
exposed.

A ring (Liu et al. 2023, `context_exchange`) passes keys and values round the ranks in n - 1 transfers of 1/n each, and
in backward their gradients in n, the last of which brings them home. Of documents that are never cut that is the same,
but for the transfer home. Of others the gathered form sends every token once, while a slice's transfers in the ring
carry its document's whole prefix.

All functions of seconds raise a `ConfigError` where the coefficients know no link for the group.
"""

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import kv_bytes_per_token, kv_gradient_bytes_per_token
from evenload.cost.coefficients import CostCoefficients
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec

TENSOR_RINGS: dict[Direction, int] = {"forward": 4, "backward": 6}
"""All-gathers and reduce-scatters of a layer's hidden states."""
WEIGHT_RINGS = 4
"""All-gathers of a layer's hidden states that W makes on top of `TENSOR_RINGS`."""
CONTEXT_RINGS: dict[Direction, int] = {"forward": 1, "backward": 2}
"""Of keys and values (backward: and of their gradients)."""


def tensor_seconds(
    model: ModelSpec, coefficients: CostCoefficients, tp: int, direction: Direction
) -> tuple[float, float]:
    """(seconds a token, seconds a pack) of one layer that are exposed."""
    return _tensor_rings_s(model, coefficients, tp, TENSOR_RINGS[direction] * coefficients.tensor_exposed_share)


def weight_gather_seconds(model: ModelSpec, coefficients: CostCoefficients, tp: int) -> tuple[float, float]:
    """(seconds a token, seconds a pack) of one layer's transfers that a split backward makes again in W, exposed."""
    if model.adapter_parameters_per_layer:
        return 0.0, 0.0  # frozen matrices have no products to defer
    return _tensor_rings_s(model, coefficients, tp, WEIGHT_RINGS * coefficients.weight_gather_exposed_share)


def _tensor_rings_s(model: ModelSpec, coefficients: CostCoefficients, tp: int, rings: float) -> tuple[float, float]:
    """Of a layer's hidden states: (seconds a token, seconds a pack)."""
    if tp == 1:
        return 0.0, 0.0
    link = coefficients.group_link(tp, stride=1)
    token_bytes = model.hidden_size * model.bytes_per_element * (tp - 1) / tp
    return rings * token_bytes / link.bandwidth_bytes_per_s, rings * (tp - 1) * link.latency_s


def context_seconds(
    model: ModelSpec,
    coefficients: CostCoefficients,
    tp: int,
    ranks: NDArray[np.int64],
    gathered_tokens: NDArray[np.float64],
    direction: Direction,
) -> NDArray[np.float64]:
    """Seconds of one layer's transfers of every pack, hidden or not; float64[num_packs].

    Args:
        ranks: int64[num_packs], ranks that share the pack.
        gathered_tokens: float64[num_packs], tokens of the whole pack whose keys and values travel; in a ring with their
            prefixes.
    """
    token_bytes = context_token_bytes(model, tp, direction)
    home_bytes, home_hops = ring_home(model, coefficients, tp, direction)
    seconds = np.zeros(len(ranks))
    for size in np.unique(ranks[gathered_tokens > 0]).tolist():
        if size == 1:
            continue
        link, of_size = coefficients.group_link(size, stride=tp), (ranks == size) & (gathered_tokens > 0)
        tokens = gathered_tokens[of_size]
        moved = tokens * token_bytes * (size - 1) / size + tokens * home_bytes / size
        hops = CONTEXT_RINGS[direction] * (size - 1) + home_hops
        seconds[of_size] = moved / link.bandwidth_bytes_per_s + hops * link.latency_s
    return seconds


def ring_home(model: ModelSpec, coefficients: CostCoefficients, tp: int, direction: Direction) -> tuple[int, int]:
    """The last transfer of a ring's gradients, to the rank with the rows: (bytes of one token and layer, transfers)."""
    if coefficients.context_exchange != "ring" or direction == "forward":
        return 0, 0
    return kv_gradient_bytes_per_token(model, tp), 1


def context_token_bytes(model: ModelSpec, tp: int, direction: Direction) -> int:
    """Of one token and layer: keys and values, in backward also their gradients."""
    both = kv_gradient_bytes_per_token(model, tp) if direction == "backward" else 0
    return kv_bytes_per_token(model, tp) + both
