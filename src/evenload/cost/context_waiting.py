"""What keys and values of shared packs cost beyond attention: how many parts they travel in, and what nothing hides.

K and V of a pack may travel in parts, each of some key heads: while one part is computed the others are under way
(`runtime/replay/context_attention.py`). Of a layer's transfers T, its attention A of shared rows and n parts

    exposed    T / n, the first part, and what of the others is longer than (n - 1) / n of A
    price      part_s of launches, and another latency, for every part but the first

so one part more pays while min(T, A) / (n·(n - 1)) exceeds what a part costs. That gives n, for every pack by itself,
from its own transfers and the mean of its ranks; at most `MOST_PARTS`, and no more than a rank has key heads.

What runs beside attention slows both down (`CostCoefficients.context_beside`): transfers take `stretch` times as long,
and attention loses `slowdown` of that time. Attention of documents that lie whole on one rank hides transfers of any
number of parts, by `context_hidden_share`. The core has the same formulas (`native/price.cpp`).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import local_kv_heads
from evenload.cost.coefficients import BesideCompute, CostCoefficients
from evenload.types.micropack import Direction
from evenload.types.model import ModelSpec

MOST_PARTS = 8


class ContextWork(NamedTuple):
    """One direction of some packs.

    Args:
        transfer_s, latency_s, plain_s: float64[num_packs], one layer's transfers, of these the latency of one part, and
            copies and transfers that nothing hides.
        local_s, all_s: float64[num_packs, P], attention of documents that lie whole on the rank, and of all.
        layers: int64[P].
    """

    transfer_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    plain_s: NDArray[np.float64]
    local_s: NDArray[np.float64]
    all_s: NDArray[np.float64]
    layers: NDArray[np.int64]


def most_parts(model: ModelSpec, coefficients: CostCoefficients, tp: int) -> int:
    """The most that packs may travel in; 1 where nothing is to run beside attention, or does not pay, or where the
    price of a part is not known."""
    beside = coefficients.context_beside
    if beside is None or not beside.pays or coefficients.context_exchange == "ring":
        return 1
    if not coefficients.prices_context_parts:
        return 1
    return min(MOST_PARTS, local_kv_heads(model, tp))


def context_parts(
    coefficients: CostCoefficients, direction: Direction, most: int, work: ContextWork
) -> NDArray[np.int64]:
    """In how many parts every pack's keys and values travel; int64[num_packs]."""
    found = np.ones(len(work.transfer_s), np.int64)
    beside = coefficients.context_beside
    if most == 1 or beside is None:
        return found
    local_s, all_s = _layer_mean(work.local_s, work.layers), _layer_mean(work.all_s, work.layers)
    left_s = np.minimum(work.transfer_s - coefficients.context_hidden_share * local_s, all_s - local_s)
    gain_s = beside.gained_share * left_s
    part_s = (coefficients.of_pass(direction).context_part_s or 0.0) + work.latency_s
    pays = gain_s > 0
    with np.errstate(divide="ignore"):
        wanted = np.floor(0.5 + np.sqrt(0.25 + gain_s[pays] / part_s[pays]))
    found[pays] = np.clip(wanted, 1, most).astype(np.int64)
    return found


def waiting_seconds(
    coefficients: CostCoefficients, direction: Direction, parts: NDArray[np.int64], work: ContextWork
) -> NDArray[np.float64]:
    """What keys and values cost beyond attention, of every pack on every stage; float64[num_packs, P]."""
    more = (parts - 1)[:, None]
    transfer_s = np.outer(work.transfer_s + (parts - 1) * work.latency_s, work.layers)
    hidden_s = coefficients.context_hidden_share * work.local_s
    if (beside := coefficients.context_beside) is not None:
        hidden_s = hidden_s + beside.gained_share * _alone_seconds_beside(beside, parts, work, transfer_s)
    part_s = coefficients.of_pass(direction).context_part_s or 0.0
    plain_s = work.plain_s[:, None] + more * part_s
    return np.maximum(0.0, transfer_s - hidden_s) + plain_s * work.layers


def beside_seconds(
    coefficients: CostCoefficients, parts: NDArray[np.int64], work: ContextWork
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(seconds in which keys and values travel, and of these while attention is computed) of every pack on every stage
    that has several parts, as a clock would show them; float64[num_packs, P] each."""
    beside = coefficients.context_beside
    if beside is None:
        return np.zeros_like(work.all_s), np.zeros_like(work.all_s)
    more = (parts - 1)[:, None]
    alone_s = np.outer(work.transfer_s + (parts - 1) * work.latency_s, work.layers)
    beside_s = _alone_seconds_beside(beside, parts, work, alone_s)
    local_s = np.minimum(alone_s - beside_s, coefficients.context_hidden_share * work.local_s)
    hidden_s = beside.stretch * beside_s + local_s
    return np.where(more > 0, hidden_s + alone_s - beside_s - local_s, 0.0), np.where(more > 0, hidden_s, 0.0)


def _alone_seconds_beside(
    beside: BesideCompute, parts: NDArray[np.int64], work: ContextWork, transfer_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Of transfers, in seconds that they take alone, what runs beside attention: all parts but the first, as far as
    attention of all parts but the last lasts; float64[num_packs, P]."""
    later = (parts - 1)[:, None] / parts[:, None]
    return np.minimum(transfer_s * later, (work.all_s - work.local_s) * later / beside.computed_share)


def _layer_mean(stage_s: NDArray[np.float64], layers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Of one layer, over all stages, summed in the order of stages, as the core does."""
    total_s = stage_s[:, 0]
    for stage in range(1, stage_s.shape[1]):
        total_s = total_s + stage_s[:, stage]
    return total_s / layers.sum()
