"""`RankedPacks`: shared packs as the rows that each of their ranks computes, priced rank by rank.

    seconds of a rank    those of its own rows as a pack of its own (`PackCosts.pack_seconds`), and what keys and values
                         of shared documents cost beyond the attention of its local ones
    seconds of a pack    of its slowest rank: the ranks wait for each other in every layer's transfers

So uneven rules of sharding (WLB §5: per-sequence) and short pieces that waste kernel tiles are in the seconds of a
pack, as they are in the run. Layers are not told apart: where layers with and without a window had different slowest
ranks, a pack would take longer than this says.

Who computes which rows says `stepplan.ranked_packs`. O(ranges + packs · ranks · stages) numpy.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.types.columns import SliceColumns
from evenload.types.micropack import Direction


@dataclass(frozen=True, eq=False)
class RankedPacks:
    """All packs of one replica and direction, rank by rank.

    Args:
        rows: the token ranges of every pack and rank, as slices of packs of their own: pack p of rank r is
            `first_rank[p] + r`.
        first_rank: int64[num_packs + 1]; a pack has `first_rank[p + 1] - first_rank[p]` ranks, 1 where it is its own.
        is_local, is_cut: bool[ranges of `rows`], of documents that lie whole on one rank, and of those that are cut in
            this direction or in the other.
        whole_tokens, cut_tokens: float64[num_packs], tokens whose keys and values travel, of documents that are never
            cut and of others (`group_comm.context_seconds`).
    """

    rows: SliceColumns
    first_rank: NDArray[np.int64]
    is_local: NDArray[np.bool_]
    is_cut: NDArray[np.bool_]
    whole_tokens: NDArray[np.float64]
    cut_tokens: NDArray[np.float64]

    def num_ranks(self) -> NDArray[np.int64]:
        """Of every pack."""
        return np.diff(self.first_rank)

    def slowest(self, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of [rows packs, P] the largest of every pack's ranks; float64[num_packs, P]."""
        return self._over_ranks(np.maximum, rank_values)

    def mean(self, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of [rows packs, P] the mean over every pack's ranks; float64[num_packs, P]."""
        return self._over_ranks(np.add, rank_values) / self.num_ranks()[:, None]

    def _over_ranks(self, operation: np.ufunc, rank_values: NDArray[np.float64]) -> NDArray[np.float64]:
        if not len(rank_values):
            return rank_values
        return operation.reduceat(rank_values, self.first_rank[:-1], axis=0)


def rank_seconds(
    costs: PackCosts, ranked: RankedPacks, direction: Direction, policy: NDArray[np.int8] | None = None
) -> NDArray[np.float64]:
    """Seconds of every rank of every pack on every virtual stage; float64[packs of `ranked.rows`, P].

    Args:
        policy: int8[num_documents], indices into `cost.activation.POLICIES`; None = all replay.

    Raises:
        ConfigError: as `PackCosts.pack_seconds`.
    """
    seconds = costs.compute_seconds(ranked.rows, direction) + rank_waiting_seconds(costs, ranked, direction)
    return seconds if policy is None else costs.under_policy(seconds, ranked.rows, direction, policy)


def rank_waiting_seconds(costs: PackCosts, ranked: RankedPacks, direction: Direction) -> NDArray[np.float64]:
    """Of `rank_seconds` what keys and values of shared documents cost; float64[packs of `ranked.rows`, P]."""
    ranks = ranked.num_ranks()
    whole_tokens, cut_tokens = np.repeat(ranked.whole_tokens, ranks), np.repeat(ranked.cut_tokens, ranks)
    return costs.waiting_seconds(
        ranked.rows, direction, np.repeat(ranks, ranks), whole_tokens, cut_tokens, ranked.is_local
    )
