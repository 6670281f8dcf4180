"""Price shared packs rank by rank (`PerRankPacks`), and split the seconds of packs by cause (`PackSplit`).

A rank takes the seconds of its own rows as a pack of its own, and what K and V of shared documents cost beyond the
attention of its local ones; a pack takes those of its slowest rank, for ranks wait for each other in every layer's
transfers. All layers count as alike. `stepplan.cp_rows` decides who computes which rows. O(ranges + packs · ranks ·
stages) numpy.

Causes add up to `PackCosts.pack_seconds`. One after the other is taken away, and each difference is its share:

    as planned ─ copies to the host ─ recompute ─ waiting for K and V ─ tensor-parallel transfers
               ─ tiles, constants and waiting for the host ─ padding = useful work

Causes of a shared pack are means over its ranks; what the slowest takes beyond the mean is `cp_imbalance_s`. Seven
times the price of `pack_seconds`.
"""

import dataclasses
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import OFFLOAD, REPLAY
from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns
from evenload.types.document import Direction


@dataclass(frozen=True, eq=False)
class PerRankPacks:
    """Hold all packs of one replica and direction, rank by rank.

    Args:
        rows: the token ranges of every pack and rank, as slices of packs: pack p of rank r is `first_rank[p] + r`.
        first_rank: int64[num_packs + 1], where the ranks of every pack begin, and the end.
        is_local, is_cut: bool[ranges of `rows`], of documents whole on one rank, and of those cut in any direction.
        whole_tokens, cut_tokens: float64[num_packs] whose K and V are exchanged, of documents never cut and of others.
    """

    rows: SliceColumns
    first_rank: NDArray[np.int64]
    is_local: NDArray[np.bool_]
    is_cut: NDArray[np.bool_]
    whole_tokens: NDArray[np.float64]
    cut_tokens: NDArray[np.float64]

    def num_ranks(self) -> NDArray[np.int64]:
        """Count the ranks of every pack."""
        return np.diff(self.first_rank)

    def slowest(self, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take, of values by rank, the largest of every pack's ranks; float64[num_packs, P]."""
        return self._over_ranks(np.maximum, rank_values)

    def mean(self, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take, of values by rank, the mean over every pack's ranks; float64[num_packs, P]."""
        return self._over_ranks(np.add, rank_values) / self.num_ranks()[:, None]

    def _over_ranks(self, operation: np.ufunc, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not len(rank_values):
            return rank_values
        return operation.reduceat(rank_values, self.first_rank[:-1], axis=0)


def rank_seconds(
    costs: PackCosts, ranked: PerRankPacks, direction: Direction, policy: NDArray[np.int8] | None = None
) -> NDArray[np.float64]:
    """Price every rank of every pack on every virtual stage under activation policies (int8[num_documents]; None = all
    replay); float64[packs of `ranked.rows`, P]. Raises as `PackCosts.pack_seconds`."""
    seconds = costs.compute_seconds(ranked.rows, direction) + rank_waiting_seconds(costs, ranked, direction)
    return seconds if policy is None else costs.under_policy(seconds, ranked.rows, direction, policy)


def rank_waiting_seconds(costs: PackCosts, ranked: PerRankPacks, direction: Direction) -> NDArray[np.float64]:
    """Return, of `rank_seconds`, what K and V of shared documents cost; float64[packs of `ranked.rows`, P]."""
    ranks = ranked.num_ranks()
    whole_tokens, cut_tokens = np.repeat(ranked.whole_tokens, ranks), np.repeat(ranked.cut_tokens, ranks)
    return costs.waiting_seconds(
        ranked.rows, direction, np.repeat(ranks, ranks), whole_tokens, cut_tokens, ranked.is_local
    )


_NOT_USEFUL = ("prefix_s_per_token", "slice_s", "pack_s", "host_slice_s", "host_pack_s")  # Of `PassCoefficients`


@dataclass(frozen=True, eq=False, kw_only=True)
class PackSplit:
    """Hold the seconds of packs by cause; float64[num_packs, P] each, names as in `TimeSplit`."""

    useful_s: NDArray[np.float64]
    kernels_s: NDArray[np.float64]
    padding_s: NDArray[np.float64]
    recompute_s: NDArray[np.float64]
    offload_s: NDArray[np.float64]
    tp_communication_s: NDArray[np.float64]
    cp_communication_s: NDArray[np.float64]
    cp_imbalance_s: NDArray[np.float64]


def split_pack_seconds(
    costs: PackCosts,
    columns: SliceColumns,
    direction: Direction,
    policy: NDArray[np.int8] | None = None,
    ranked: PerRankPacks | None = None,
) -> PackSplit:
    """Split the seconds of every pack on every virtual stage by cause, under activation policies (int8[num_documents];
    None = all replay). `ranked`: the same packs rank by rank; None = nobody shares them, or the mean that searches
    compare."""
    coefficients, layout = costs.coefficients, costs.layout
    without_tp = msgspec.structs.replace(coefficients, tensor_exposed_share=0.0)
    passes = {
        name: msgspec.structs.replace(getattr(coefficients, name), **dict.fromkeys(_NOT_USEFUL, 0.0))
        for name in ("forward", "backward")
    }
    ideal = msgspec.structs.replace(without_tp, attention_tile=1, head_pack_s=0.0, **passes)
    rows = columns if ranked is None else ranked.rows
    mean = (lambda rank_s: rank_s) if ranked is None else ranked.mean
    bare = layout.arrangement
    ideal_costs = PackCosts(costs.model, ideal, bare)
    ideal_s = mean(ideal_costs.compute_seconds(rows, direction))
    # Ideal work divides evenly, so that its mean over ranks needs no rows.
    unpadded = dataclasses.replace(columns, pad_to=np.zeros_like(columns.pad_to))
    useful_s = ideal_costs.compute_seconds(unpadded, direction) if columns.pad_to.any() else ideal_s
    rank_all_s = rank_compute_s = costs.compute_seconds(rows, direction)
    if bare != layout:
        rank_compute_s = PackCosts(costs.model, coefficients, bare).compute_seconds(rows, direction)
    compute_s = mean(rank_compute_s)
    without_tp_s = mean(PackCosts(costs.model, without_tp, bare).compute_seconds(rows, direction))
    if ranked is None:
        rank_waiting_s = costs.pack_seconds(columns, direction) - rank_all_s
    else:
        rank_waiting_s = rank_waiting_seconds(costs, ranked, direction)
    replayed_s = rank_compute_s + rank_waiting_s
    recomputed_s = planned_s = rank_all_s + rank_waiting_s
    if policy is not None:
        kept = np.where(policy == OFFLOAD, REPLAY, policy).astype(np.int8)
        recomputed_s, planned_s = (costs.under_policy(recomputed_s, rows, direction, codes) for codes in (kept, policy))
    slowest_s = planned_s if ranked is None else ranked.slowest(planned_s)
    return PackSplit(
        useful_s=useful_s,
        kernels_s=without_tp_s - ideal_s,
        padding_s=ideal_s - useful_s,
        recompute_s=mean(recomputed_s - replayed_s),
        offload_s=mean(planned_s - recomputed_s),
        tp_communication_s=compute_s - without_tp_s,
        cp_communication_s=mean(rank_waiting_s),
        cp_imbalance_s=slowest_s - mean(planned_s),
    )
