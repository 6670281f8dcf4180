"""How the ranks of a context-parallel group share each pack, decided when a plan is made (WLB §5).

    per_sequence, per_document   as `stepplan.rank_rows` has them
    adaptive                     of every pack the faster of the two (WLB §5.3)
    mixed                        long slices per document, short ones whole on one rank, longest first to the least
                                 loaded; where long begins, and whether one of the two above is faster, is tried.
                                 Beyond WLB.

A plan says what was decided (`MicroPack.sharding`): per_sequence, per_document or an owner for every slice, so nobody
needs prices to run it. Here is only what may be tried; `plan.sharing.as_run` chooses, by the seconds that the plan gets
in the end. Skrull's owners (DACP) come from `plan.sharing.dacp`. O(slices) numpy.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from evenload.cost.pack_cost import PackCosts
from evenload.plan.packing.bin_packing import longest_first
from evenload.types.columns import SliceColumns
from evenload.types.micropack import PackSharding

MIXED_BOUNDS = (1, 4, 16)
"""Slices of at least so many tiles a chunk count as long; all are tried."""
CpRule = Literal["per_sequence", "per_document", "adaptive", "mixed"]
Shardings = tuple[PackSharding, ...]
"""`MicroPack.sharding` of every forward pack of a replica."""


def possible_shardings(rule: CpRule, costs: PackCosts, packs: SliceColumns) -> list[Shardings]:
    """What a rule may choose from, pack by pack.

    Args:
        rule: `plan.options.cp_sharding`.
        packs: forward packs of one replica.
    """
    ranks = packs.pack_ranks()
    is_shared = (ranks > 1).tolist()
    if not any(is_shared):
        return [("",) * packs.num_packs]
    names: list[PackSharding] = ["per_sequence", "per_document"] if rule in ("adaptive", "mixed") else [rule]
    found: list[Shardings] = [tuple(name if shared else "" for shared in is_shared) for name in names]
    return [*found, *_mixed(costs, packs, ranks)] if rule == "mixed" else found


def _mixed(costs: PackCosts, packs: SliceColumns, ranks: NDArray[np.int64]) -> list[Shardings]:
    tokens, pack = packs.slice_tokens(), packs.pack_of_slice()
    of_slices = costs.features.of_slices(packs.start, packs.start + tokens)
    seconds = of_slices @ sum(matrix.sum(axis=1) for matrix in costs.stage_seconds.values())
    edges = packs.pack_offset.tolist()
    found: list[Shardings] = []
    owner, was_short = np.full(packs.num_slices, -1), np.zeros(packs.num_slices, bool)
    for bound in MIXED_BOUNDS:
        is_short = (ranks[pack] > 1) & (tokens < bound * 2 * ranks[pack] * costs.coefficients.attention_tile)
        changed = np.unique(pack[is_short != was_short])
        if not len(changed):
            continue
        was_short, owner = is_short, owner.copy()
        for index in changed.tolist():
            low, high = edges[index : index + 2]
            short = low + np.flatnonzero(is_short[low:high])
            for rank, members in enumerate(longest_first(seconds[short], int(ranks[index]))):
                owner[short[members]] = rank
        listed = owner.tolist()
        found.append(
            tuple(
                tuple(listed[edges[at] : edges[at + 1]]) if many > 1 else "" for at, many in enumerate(ranks.tolist())
            )
        )
    return found
