"""How the ranks of a context-parallel group share each pack, decided when a plan is made (WLB §5).

    per_sequence, per_document   as `stepplan.rank_ranges` has them
    adaptive                     the faster of the two by predicted time, tiles included (WLB §5.3)
    mixed                        long slices per document, short ones whole on one rank, longest first to the least
                                 loaded; the bound between long and short by predicted time, both of the above among
                                 the choices. Beyond WLB.

A plan says what was decided (`MicroPack.sharding`): per_sequence, per_document or an owner for every slice, so nobody
needs prices to run it. `per_sequence` is no choice where a slice is cut otherwise in backward: a rank keeps the rows of
its forward, and the backward packs would be as uneven as they fall.

Predicted seconds are of one stage, forward and backward: linear work, attention with incomplete tiles at their full
price, the prefix in front of a range and a constant, and the transfers of keys and values that attention of slices
whole on one rank does not hide (in a ring also attention of the others, but in the last round). Skrull's owners (DACP)
come from `plan.sharing.dacp`. O(slices · cp) numpy for all packs; below 1 ms for a pack of 256K tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.plan.packing.bin_packing import longest_first
from evenload.plan.sharing.sharding_cost import ShardingCost
from evenload.stepplan.rank_ranges import RankRanges, joined, ranges_by_owner, ranges_per_sequence
from evenload.types.columns import SliceColumns
from evenload.types.micropack import PackSharding

MIXED_BOUNDS = (1, 4, 16)
"""Slices of at least so many tiles a chunk count as long; all are tried."""
CpRule = Literal["per_sequence", "per_document", "adaptive", "mixed"]


@dataclass(frozen=True, eq=False)
class SharedPacks:
    """Packs as their group shares them.

    Args:
        shardings: of every pack.
        rank_s: float64[packs, cp], predicted seconds of every rank.
    """

    shardings: tuple[PackSharding, ...]
    rank_s: NDArray[np.float64]


def pack_shardings(
    rule: CpRule,
    forward: SliceColumns,
    backward: SliceColumns,
    cost_of: Callable[[int], ShardingCost],
) -> tuple[PackSharding, ...]:
    """`MicroPack.sharding` of every forward pack of a replica.

    Args:
        rule: `plan.options.cp_sharding`.
        cost_of: of a group with so many ranks; asked where the rule chooses by seconds.
    """
    ranks = forward.pack_ranks()
    found: list[PackSharding] = ["" if count <= 1 else rule for count in ranks.tolist()]  # type: ignore[list-item]
    if rule in ("per_sequence", "per_document") or not (ranks > 1).any():
        return tuple(found)
    stop = np.maximum(forward.stop, np.repeat(forward.pad_to, np.diff(forward.pack_offset)))
    is_cut_otherwise = _cut_otherwise(forward, stop, backward)
    for cp in np.unique(ranks[ranks > 1]).tolist():
        chosen = np.flatnonzero(ranks == cp)
        slices = np.isin(forward.pack_of_slice(), chosen)
        offset = np.concatenate([[0], np.cumsum(np.diff(forward.pack_offset)[chosen])])
        shared = share_packs(
            rule, forward.start[slices], stop[slices], cp, cost_of(cp), offset, is_cut_otherwise[chosen]
        )
        for index, sharding in zip(chosen.tolist(), shared.shardings, strict=True):
            found[index] = sharding
    return tuple(found)


def _cut_otherwise(forward: SliceColumns, stop: NDArray[np.int64], backward: SliceColumns) -> NDArray[np.bool_]:
    """bool[packs]: a backward slice begins inside one of the forward pack's."""
    if backward is forward:
        return np.zeros(forward.num_packs, bool)
    scale = int(max(stop.max(initial=0), backward.stop.max(initial=0))) + 1
    edges = np.sort(backward.doc * scale + backward.start)
    base = forward.doc * scale
    inside = np.searchsorted(edges, base + stop) - np.searchsorted(edges, base + forward.start, side="right")
    return forward.pack_sums(inside) > 0


def share_packs(
    rule: CpRule,
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    cp: int,
    cost: ShardingCost,
    pack_offset: NDArray[np.int64] | None = None,
    is_cut_otherwise: NDArray[np.bool_] | None = None,
) -> SharedPacks:
    """Share packs among the ranks of one group.

    Args:
        rule: a name of the module's table.
        start, stop: int64[k], the packs' slices; `start` is the length of the prefix in front.
        cp: ranks.
        pack_offset: int64[p + 1]; pack i holds slices `[pack_offset[i], pack_offset[i + 1])`; None = one pack.
        is_cut_otherwise: bool[p], where rules that choose do not choose per_sequence; None = nowhere.

    Raises:
        ConfigError: an unknown rule, or no ranks.
    """
    if cp < 1:
        raise ConfigError(f"cp sharding: cp is {cp}, must be at least 1")
    if rule not in ("per_sequence", "per_document", "adaptive", "mixed"):
        raise ConfigError(f"unknown cp sharding '{rule}'; available: per_sequence, per_document, adaptive, mixed")
    packs = _Packs(start, stop, np.array([0, len(start)]) if pack_offset is None else pack_offset, cp, cost)
    if rule in ("per_sequence", "per_document"):
        return packs.fastest([packs.per_sequence() if rule == "per_sequence" else packs.per_document()])
    sequence = packs.per_sequence()
    if is_cut_otherwise is not None:
        sequence.rank_s[is_cut_otherwise] = np.inf
    return packs.fastest([sequence, packs.per_document(), *(packs.mixed() if rule == "mixed" else ())])


class _Choice(NamedTuple):
    """All packs shared in one way: by a rule or by int64[slices] owners; float64[packs, cp] predicted seconds."""

    how: Literal["per_sequence", "per_document"] | NDArray[np.int64]
    rank_s: NDArray[np.float64]


class _Packs:
    """Packs of one group, shared and priced in several ways."""

    def __init__(
        self,
        start: NDArray[np.int64],
        stop: NDArray[np.int64],
        pack_offset: NDArray[np.int64],
        cp: int,
        cost: ShardingCost,
    ) -> None:
        self.start, self.stop, self.offset = start, stop, pack_offset
        self.cp, self.cost = cp, cost
        self.num_packs = len(pack_offset) - 1
        self.pack = np.repeat(np.arange(self.num_packs), np.diff(pack_offset))

    def per_sequence(self) -> _Choice:
        ranges = joined(ranges_per_sequence(self.start, self.stop, self.offset, self.cp))
        return _Choice("per_sequence", self._rank_s(ranges, np.ones(len(self.start), bool)))

    def per_document(self) -> _Choice:
        return _Choice("per_document", self._owned_s(np.full(len(self.start), -1)))

    def mixed(self) -> list[_Choice]:
        tokens, seconds = self.stop - self.start, _range_seconds(self.start, self.stop, self.cost)
        found: list[_Choice] = []
        owner, was_short = np.full(len(tokens), -1), np.zeros(len(tokens), bool)
        for bound in MIXED_BOUNDS:
            is_short = tokens < bound * 2 * self.cp * self.cost.tile
            changed = np.unique(self.pack[is_short != was_short])
            if not len(changed):
                continue
            was_short, owner = is_short, owner.copy()
            num_short = np.bincount(self.pack[is_short], minlength=self.num_packs)
            owner[is_short & (num_short == 1)[self.pack]] = 0
            for pack in changed[num_short[changed] > 1].tolist():
                low, high = self.offset[pack : pack + 2].tolist()
                short = low + np.flatnonzero(is_short[low:high])
                for rank, members in enumerate(longest_first(seconds[short], self.cp)):
                    owner[short[members]] = rank
            found.append(_Choice(owner, self._owned_s(owner)))
        return found

    def fastest(self, found: Sequence[_Choice]) -> SharedPacks:
        """Of every pack the first with the least seconds of its slowest rank."""
        best = np.argmin([one.rank_s.max(axis=1) for one in found], axis=0)
        edges = self.offset.tolist()
        shardings = tuple(
            tuple(how[edges[pack] : edges[pack + 1]].tolist()) if isinstance(how, np.ndarray) else how
            for pack, how in enumerate(found[which].how for which in best.tolist())
        )
        return SharedPacks(shardings, np.stack([one.rank_s for one in found])[best, np.arange(self.num_packs)])

    def _owned_s(self, owner: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._rank_s(joined(ranges_by_owner(self.start, self.stop, owner, self.offset, self.cp)), owner < 0)

    def _rank_s(self, ranges: RankRanges, travels: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Predicted seconds of every rank; float64[packs, cp].

        Args:
            travels: bool[k], slices whose keys and values go to all ranks.
        """
        cost = self.cost
        cell = self.pack[ranges.piece] * self.cp + ranges.rank

        def of_ranks(range_s: NDArray[np.float64]) -> NDArray[np.float64]:
            sums = np.bincount(cell, weights=range_s, minlength=self.num_packs * self.cp)
            return sums.astype(np.float64, copy=False).reshape(self.num_packs, self.cp)

        seconds = _range_seconds(ranges.start, ranges.stop, cost)
        compute_s = of_ranks(seconds)
        if self.cp == 1:
            return compute_s
        others_s = cost.work.linear_s * (ranges.stop - ranges.start) + cost.work.slice_s
        range_attention_s = seconds - others_s - _prefix_seconds(ranges.start, cost)
        while_gathering = (self.cp - 1) / self.cp if cost.is_ring else 0.0
        hiding_s = of_ranks(range_attention_s * np.where(travels[ranges.piece], while_gathering, 1.0))
        sent = self.stop if cost.is_ring else self.stop - self.start
        gathered = np.bincount(self.pack, weights=np.where(travels, sent, 0), minlength=self.num_packs)[:, None]
        exposed_s = np.maximum(0.0, cost.gather_s_per_token * gathered - cost.hidden_share * hiding_s)
        return compute_s + exposed_s + cost.place_s_per_token * gathered


def _range_seconds(start: NDArray[np.int64], stop: NDArray[np.int64], cost: ShardingCost) -> NDArray[np.float64]:
    """Of every range; rows that it lacks to whole tiles cost like its last row."""
    seconds = cost.work.slice_works_s(start, stop) + _prefix_seconds(start, cost)
    missing = -(stop - start) % cost.tile
    for coefficient, window in cost.work.attention_s:
        seconds = seconds + coefficient * missing * (np.minimum(stop, window) if window else stop)
    return seconds


def _prefix_seconds(start: NDArray[np.int64], cost: ShardingCost) -> NDArray[np.float64]:
    seconds = np.zeros(len(start))
    for coefficient, window in cost.prefix_s:
        seconds += coefficient * (np.minimum(start, window) if window else start)
    return seconds
