"""Price transfers inside tensor- and context-parallel groups, per layer.

Tensor parallelism with sequence parallelism (Korthikanti et al. 2022): hidden states are all-gathered before a block
(attention, feed-forward) and reduce-scattered after it: 2 rings forward; backward the same 2 for gradients and 1 more
all-gather for weight gradients. `tensor_exposed_share` of their bytes does not hide behind matrix products; their
latency does not hide. W of a split backward gathers inputs and gradients again: 2 more. Experts lie on the ranks of the
group, and every rank sends its own rows to those that they have chosen (`runtime.replay.experts`): nothing hides that.

Context parallelism: K and V of a pack are all-gathered before attention, dK and dV reduce-scattered in backward,
where K and V are gathered again of documents that are never cut; of others every rank keeps them. Transfers hide behind
`context_hidden_share` of the attention of *local* documents, those that lie whole on one rank, copies into place
(`copy_s_per_byte`) behind nothing. A ring (Liu et al. 2023, `context_exchange`) passes K and V on in n - 1 transfers of
1/n each, and in backward their gradients in n, the last of which hides behind nothing. The others hide behind local
attention and (n - 1)/n of that of the rounds. A slice's transfers carry its document's whole prefix.

All functions of seconds raise a `ConfigError` where the coefficients know no link for the group.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.layer_counts import kv_bytes_per_token, kv_gradient_bytes_per_token, over_kinds, stage_kinds
from evenload.types.document import Direction
from evenload.types.layer_kind import LayerKind
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

BLOCK_RINGS: dict[Direction, int] = {"forward": 2, "backward": 3}
"""All-gathers and reduce-scatters of hidden states of a block of a layer."""
EXPERT_TRANSFERS: dict[Direction, int] = {"forward": 2, "backward": 3}
"""All-to-alls of rows of a block of experts: there and back, in backward also the gradients of outputs."""
_EXPERT_CALLS: dict[Direction, int] = {"forward": 3, "backward": 6}  # with numbers of rows and routing weights
TENSOR_CHUNKS = 4
"""Transfers that a collective of a pack's hidden states is divided into at most, so that products hide all but one."""
WEIGHT_RINGS = 2  # All-gathers of a block's hidden states that W makes on top of `BLOCK_RINGS`


class ContextTraffic(NamedTuple):
    """Hold the bytes of a token of a shared slice that are sent on one layer in one direction, the collectives that
    carry them (`rings`), each of n - 1 transfers from neighbour to neighbour, and the bytes copied into their place."""

    token_bytes: int
    rings: int
    placed_bytes: int


class ContextSeconds(NamedTuple):
    """Hold the seconds of K and V of shared slices on one layer of every pack, float64[num_packs] each: transfers that
    attention may hide, and copies and transfers that nothing hides."""

    transfer_s: NDArray[np.float64]
    plain_s: NDArray[np.float64]


def weight_gather_seconds(model: ModelSpec, coefficients: CostCoefficients, tp: int) -> tuple[float, float]:
    """Return (seconds a token, seconds a pack) of one block's exposed transfers that W of a split backward repeats."""
    if model.has_adapters:
        return 0.0, 0.0  # frozen matrices have no products to defer
    return tensor_ring_seconds(model, coefficients, tp, WEIGHT_RINGS * coefficients.weight_gather_exposed_share)


def tensor_ring_seconds(model: ModelSpec, coefficients: CostCoefficients, tp: int, rings: float) -> tuple[float, float]:
    """Return (seconds a token, seconds a pack) of so many all-gathers and reduce-scatters of hidden states."""
    if tp == 1:
        return 0.0, 0.0
    link = coefficients.group_link(tp, stride=1)
    token_bytes = model.hidden_size * model.bytes_per_element * (tp - 1) / tp
    return rings * token_bytes / link.bandwidth_bytes_per_s, rings * (tp - 1) * link.latency_s


def exposed_ring_seconds(model: ModelSpec, coefficients: CostCoefficients, tp: int, rings: int) -> tuple[float, float]:
    """Return (seconds a token, seconds a pack) of as many transfers that no product hides."""
    token_s, pack_s = tensor_ring_seconds(model, coefficients, tp, rings)
    share = coefficients.tensor_exposed_share
    return share * token_s, pack_s if share else 0.0


def tensor_seconds(
    model: ModelSpec, coefficients: CostCoefficients, tp: int, direction: Direction
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (seconds a token, seconds a pack) of a tensor-parallel group's transfers on one layer of every kind that
    no product hides; float64[K] each."""
    blocks = np.array([kind.blocks for kind in model.kinds], np.float64)
    token_s, pack_s = exposed_ring_seconds(model, coefficients, tp, BLOCK_RINGS[direction])
    experts = [_expert_seconds(kind, model, coefficients, tp, direction) for kind in model.kinds]
    return blocks * token_s + [one[0] for one in experts], blocks * pack_s + [one[1] for one in experts]


def _expert_seconds(
    kind: LayerKind, model: ModelSpec, coefficients: CostCoefficients, tp: int, direction: Direction
) -> tuple[float, float]:
    # Coefficients of a measured group have all transfers in the layers' seconds.
    if kind.experts is None or tp == 1 or not coefficients.tensor_exposed_share:
        return 0.0, 0.0
    link = coefficients.group_link(tp, stride=1)
    # Of a rank's own rows, 1/tp of a pack's, those of other ranks' experts travel.
    row_bytes = kind.experts.chosen * kind.experts.width * model.bytes_per_element
    token_bytes = EXPERT_TRANSFERS[direction] * row_bytes * (tp - 1) / tp**2
    return token_bytes / link.bandwidth_bytes_per_s, _EXPERT_CALLS[direction] * (tp - 1) * link.latency_s


def context_seconds(
    model: ModelSpec,
    coefficients: CostCoefficients,
    tp: int,
    ranks: NDArray[np.int64],
    whole_tokens: NDArray[np.float64],
    cut_tokens: NDArray[np.float64],
    direction: Direction,
) -> ContextSeconds:
    """Return the seconds of K and V of every pack on one layer, before anything hides them: of the tokens of the whole
    pack whose K and V its `ranks` exchange, of documents that are never cut and of others (num_packs each), in a ring
    with their prefixes. The layer is the one with most K and V (`exchanging_layers`)."""
    whole, cut = (context_traffic(model, coefficients, tp, direction, is_cut=is_cut) for is_cut in (False, True))
    home_bytes, home_hops = ring_home(model, coefficients, tp, direction)
    seconds = ContextSeconds(np.zeros(len(ranks)), np.zeros(len(ranks)))
    tokens = whole_tokens + cut_tokens
    for size in np.unique(ranks[tokens > 0]).tolist():
        if size == 1:
            continue
        link, of_size = coefficients.group_link(size, stride=tp), (ranks == size) & (tokens > 0)
        from_whole, from_cut = whole_tokens[of_size], cut_tokens[of_size]
        moved = (from_whole * whole.token_bytes + from_cut * cut.token_bytes) * (size - 1) / size
        hops = np.where(from_whole > 0, whole.rings, cut.rings) * (size - 1)
        seconds.transfer_s[of_size] = moved / link.bandwidth_bytes_per_s + hops * link.latency_s
        placed = from_whole * whole.placed_bytes + from_cut * cut.placed_bytes
        home_s = tokens[of_size] * home_bytes / size / link.bandwidth_bytes_per_s + home_hops * link.latency_s
        seconds.plain_s[of_size] = placed * coefficients.copy_s_per_byte + home_s
    return seconds


def context_traffic(
    model: ModelSpec, coefficients: CostCoefficients, tp: int, direction: Direction, *, is_cut: bool
) -> ContextTraffic:
    """Return what a token of a document that is cut, or of one that never is, moves in forward or in backward on the
    layer with most K and V."""
    kv, gradients = (int(of_kinds(model, tp).max()) for of_kinds in (kv_bytes_per_token, kv_gradient_bytes_per_token))
    if coefficients.context_exchange == "ring":
        return ContextTraffic(kv, 1, 0) if direction == "forward" else ContextTraffic(kv + gradients, 2, 0)
    if direction == "forward":
        return ContextTraffic(kv, 1, 2 * kv if is_cut else kv)  # gathered rows -> keys of the slice -> the prefix kept
    # Sums of gradients are cleared and filled before they are scattered.
    return (
        ContextTraffic(gradients, 1, 2 * gradients) if is_cut else ContextTraffic(kv + gradients, 2, kv + 2 * gradients)
    )


def ring_home(model: ModelSpec, coefficients: CostCoefficients, tp: int, direction: Direction) -> tuple[int, int]:
    """Return (bytes of one token and layer, transfers) of the last transfer of a ring's gradients."""
    if coefficients.context_exchange != "ring" or direction == "forward":
        return 0, 0
    return int(kv_gradient_bytes_per_token(model, tp).max()), 1


def exchanging_layers(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.float64]:
    """Count the layers of every stage, each as the share that its K and V are of the most that a layer has;
    float64[P]."""
    kv = kv_bytes_per_token(model, layout.tp)
    return over_kinds(stage_kinds(model, layout), kv / max(1, kv.max()))
