"""`RankPacks`: a plan's packs as one rank computes them: its rows, their tokens, and how they attend.

Where a replica's rank runs a pack alone, its rows are the pack's slices. Where a group shares it (`parallel.cp`,
DP-Merge), they are the token ranges of `stepplan.rank_rows`, and attention goes through the group. Price: about 10 ns a
token and direction for ids, targets and positions, which may be made in another thread before the step (`collate`).
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenload.data.blocks import TokenTable, table_of
from evenload.errors import InvalidPlanError
from evenload.feed.collate import collate_pack, collate_ranges
from evenload.runtime.comm.cp_groups import ContextGroup
from evenload.runtime.device import to_device
from evenload.runtime.replay.context_attention import GatherAttention, PackAttention, RingAttention
from evenload.stepplan.rank_rows import PackRows, ReplicaRows, replica_rows
from evenload.types.document import Direction, MicroPack, Range, ReplicaBlock
from evenload.types.layout import TransferOrder
from evenload.types.plan import StepPlan


@dataclass(frozen=True, eq=False)
class PackTokens:
    """Token data of a pack, as the first and the last stage need it.

    Args:
        token_ids, targets, positions: int64[T]; target -100 carries no loss.
        shared: attention, where other ranks have rows of the same slices; None = this rank has them all.
        closes: slices that a backward ends, where they are not the ranges.
    """

    ranges: tuple[Range, ...]
    token_ids: Tensor
    targets: Tensor
    positions: Tensor
    shared: PackAttention | None = None
    closes: tuple[Range, ...] | None = None

    @property
    def ended(self) -> tuple[Range, ...]:
        return self.ranges if self.closes is None else self.closes


Exchange = Literal["all_gather", "ring"]
"""How keys and values of shared documents reach the ranks that need them."""


@dataclass(frozen=True, eq=False)
class RankStep:
    """One rank's part of a step, prepared (`runtime.step_source`); good for one run."""

    plan: StepPlan
    packs: "RankPacks"
    order: TransferOrder


class RankPacks:
    """One step's packs on one rank; `InvalidPlanError` for a pack shared by a group that there is not, or a sharding
    that cannot be run."""

    def __init__(
        self,
        plan: StepPlan,
        dp_rank: int,
        groups: Mapping[ReplicaBlock, ContextGroup],
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        self._packs = plan.pack_plans[dp_rank]
        self._groups = groups
        self._exchange: Exchange = exchange
        self._device = device
        everything = (*self._packs.forward, *self._packs.backward)
        self._rows: ReplicaRows | None = None
        self._ready: dict[tuple[Direction, int], PackTokens] = {}
        if plan.layout.cp > 1 or any(piece.cp > 1 for pack in everything for piece in pack.slices):
            self._rows = replica_rows(plan, dp_rank)
            for pack in everything:
                if (shared := self._rows.of_pack(pack)) is None or shared.block in groups:
                    continue
                raise InvalidPlanError(
                    f"step {plan.step}: {pack.direction} pack {pack.index} is shared by {shared.block.size} replicas "
                    f"from {shared.block.first}; dp={plan.layout.dp} has groups of {sorted({b.size for b in groups})} "
                    "replicas"
                )

    def ranges(self, pack: MicroPack) -> tuple[Range, ...]:
        """The token ranges this rank computes, padding included, in row order."""
        shared = self._shared(pack)
        return pack_ranges(pack) if shared is None else shared.ranges(self._rank_in(shared))

    def stored_tokens(self) -> dict[int, int]:
        """Rows of keys and values that this rank stores of every document."""
        stored: dict[int, int] = {}
        for pack in self._packs.forward:
            shared = self._shared(pack)
            if shared is None:
                for doc_id, _, stop in pack_ranges(pack):
                    stored[doc_id] = max(stop, stored.get(doc_id, 0))
            else:
                assert self._rows is not None
                rank = self._rank_in(shared)
                for doc_id, _, _ in shared.held(rank):
                    rows = self._rows.documents[doc_id]
                    holds_all = rows.is_cut and self._exchange == "all_gather"
                    stored[doc_id] = rows.num_tokens if holds_all else rows.rows_before(rank, rows.num_tokens)
        return stored

    def collate(self, tokens: Mapping[int, NDArray[np.int32]], only: Container[int] | None = None) -> "RankPacks":
        """Make all packs, or those of some indices, ready from the tokens of every document of the replica: ids,
        targets and positions, and where the rows of shared ones travel. Returns itself."""
        documents = table_of(tokens)
        for pack in (*self._packs.forward, *self._packs.backward):
            if only is None or pack.index in only:
                self._ready[pack.direction, pack.index] = self._collated(pack, documents)
        return self

    def load(self, pack: MicroPack) -> PackTokens:
        """This rank's rows of a collated pack, ready to run once; every virtual stage loads it."""
        return self._ready[pack.direction, pack.index]

    def _collated(self, pack: MicroPack, documents: TokenTable) -> PackTokens:
        shared = self._shared(pack)
        if shared is None:
            batch = collate_pack(pack, documents)
            columns = self._on_device((batch.token_ids, batch.targets, batch.positions))
            return PackTokens(pack_ranges(pack), *columns)
        rank = self._rank_in(shared)
        ranges = shared.ranges(rank)
        columns = collate_ranges(
            [doc_id for doc_id, _, _ in ranges],
            np.array([start for _, start, _ in ranges], dtype=np.int64),
            np.array([stop for _, _, stop in ranges], dtype=np.int64),
            documents,
        )
        attention = self._attention(pack, shared) if shared.shared else None
        return PackTokens(ranges, *self._on_device(columns), shared=attention, closes=shared.held(rank))

    def _on_device(self, columns: Iterable[NDArray[np.int64]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, targets, positions = (to_device(torch.from_numpy(column), self._device) for column in columns)
        return ids, targets, positions

    def _attention(self, pack: MicroPack, shared: PackRows) -> PackAttention:
        group = self._groups[shared.block]
        label = f"{pack.direction} pack {pack.index}"
        if self._exchange == "ring":
            return RingAttention(shared, group, label)
        return GatherAttention(shared, group, label, self._device)

    def _shared(self, pack: MicroPack) -> PackRows | None:
        return None if self._rows is None else self._rows.of_pack(pack)

    def _rank_in(self, shared: PackRows) -> int:
        return self._groups[shared.block].rank


def pack_ranges(pack: MicroPack) -> tuple[Range, ...]:
    return tuple(Range(s.doc_id, s.start, pack.pad_to or s.stop) for s in pack.slices)
