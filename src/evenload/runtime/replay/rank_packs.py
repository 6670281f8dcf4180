"""`RankPackTokens` holds a plan's packs as one rank computes them: its rows, their tokens, and how they attend.

Where a replica's rank runs a pack alone, its rows are the pack's slices. Where a group shares it (`parallel.cp`,
DP-Merge), they are the token ranges of `stepplan.cp_rows`, and attention goes through the group.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenload.data.blocks import TokenTable, as_token_table
from evenload.errors import InvalidPlanError
from evenload.feed.collate import LabelEdges, collate_pack, collate_ranges
from evenload.runtime.comm.collectives import ContextGroup
from evenload.runtime.device import to_device
from evenload.runtime.replay.context_attention import GatherAttention, PackAttention, RingAttention
from evenload.runtime.replay.shared_states import SharedStates
from evenload.stepplan.cp_rows import PackRows, ReplicaRows, replica_rows
from evenload.stepplan.tree_slices import tree_offences
from evenload.types.document import Direction, MicroPack, Range, ReplicaBlock
from evenload.types.layout import TransferOrder
from evenload.types.plan import StepPlan
from evenload.types.tree import TreeShape, shape_of


@dataclass(frozen=True, eq=False)
class PackTokens:
    """Holds the tokens of a pack, as the first and the last stage need them.

    Args:
        token_ids, targets, positions: int64[T]; target -100 carries no loss.
        shared: attention, where other ranks have rows of the same slices; None = this rank has them all.
        states: then states of layers that carry one.
        closes: slices that a backward ends, where they are not the ranges.
        trees: shapes of the pack's documents that are trees.
        edges: as of `PackBatch`, on the host.
    """

    ranges: tuple[Range, ...]
    token_ids: Tensor
    targets: Tensor
    positions: Tensor
    shared: PackAttention | None = None
    states: SharedStates | None = None
    closes: tuple[Range, ...] | None = None
    trees: Mapping[int, TreeShape] = field(default_factory=dict)
    edges: LabelEdges | None = None

    @property
    def ended(self) -> tuple[Range, ...]:
        return self.ranges if self.closes is None else self.closes


Exchange = Literal["all_gather", "ring"]
"""How ranks exchange keys and values of shared documents."""


@dataclass(frozen=True, eq=False)
class RankStep:
    """Holds one rank's prepared part of a step (`runtime.step_source`), for one run."""

    plan: StepPlan
    packs: "RankPackTokens"
    order: TransferOrder


class RankPackTokens:
    """Holds one step's packs on one rank, and the shapes of those documents that are `trees`; `InvalidPlanError` for an
    unknown group, or a sharding that cannot run."""

    def __init__(
        self,
        plan: StepPlan,
        dp_rank: int,
        groups: Mapping[ReplicaBlock, ContextGroup],
        exchange: Exchange,
        device: torch.device,
    ) -> None:
        self._packs = plan.pack_plans[dp_rank]
        self._groups, self._exchange, self._device = groups, exchange, device
        all_packs = (*self._packs.forward, *self._packs.backward)
        if offences := list(tree_offences(plan)):
            raise InvalidPlanError(f"step {plan.step}: {'; '.join(offences)}")
        self.trees = {one.doc_id: shape_of(one.segments) for one in plan.documents if one.segments}
        self._rows: ReplicaRows | None = None
        self._collated: dict[tuple[Direction, int], PackTokens] = {}
        if plan.layout.cp > 1 or any(piece.cp > 1 for pack in all_packs for piece in pack.slices):
            self._rows = replica_rows(plan, dp_rank)
            for pack in all_packs:
                if (shared := self._rows.of_pack(pack)) is None or shared.block in groups:
                    continue
                raise InvalidPlanError(
                    f"step {plan.step}: {pack.direction} pack {pack.index} is shared by {shared.block.size} replicas "
                    f"from {shared.block.first}; dp={plan.layout.dp} has groups of {sorted({b.size for b in groups})} "
                    "replicas"
                )

    def ranges(self, pack: MicroPack) -> tuple[Range, ...]:
        """Return the token ranges that this rank computes, padding included, in row order."""
        shared = self._shared(pack)
        return pack_ranges(pack) if shared is None else shared.ranges(self._groups[shared.block].rank)

    def stored_tokens(self) -> dict[int, int]:
        """Return how many tokens' keys and values this rank stores of every document."""
        stored: dict[int, int] = {}
        for pack in self._packs.forward:
            shared = self._shared(pack)
            if shared is None:
                for doc_id, _, stop in pack_ranges(pack):
                    stored[doc_id] = max(stop, stored.get(doc_id, 0))
            else:
                assert self._rows is not None
                rank = self._groups[shared.block].rank
                for doc_id, _, _ in shared.held(rank):
                    rows = self._rows.documents[doc_id]
                    holds_all = rows.is_cut and self._exchange == "all_gather"
                    stored[doc_id] = rows.num_tokens if holds_all else rows.rows_before(rank, rows.num_tokens)
        return stored

    def collate(self, tokens: Mapping[int, NDArray[np.int32]], only: Container[int] | None = None) -> "RankPackTokens":
        """Make the tokens of all packs, or those of some indices, from the replica's documents; return itself."""
        documents = as_token_table(tokens)
        for pack in (*self._packs.forward, *self._packs.backward):
            if only is None or pack.index in only:
                self._collated[pack.direction, pack.index] = self._pack_tokens(pack, documents)
        return self

    def load(self, pack: MicroPack) -> PackTokens:
        """Return this rank's rows of a collated pack, to run once; every virtual stage loads it."""
        return self._collated[pack.direction, pack.index]

    def _pack_tokens(self, pack: MicroPack, documents: TokenTable) -> PackTokens:
        shared = self._shared(pack)
        if shared is None:
            batch = collate_pack(pack, documents, self.trees)
            columns = self._on_device((batch.token_ids, batch.targets, batch.positions))
            trees = {one.doc_id: self.trees[one.doc_id] for one in pack.slices if one.doc_id in self.trees}
            return PackTokens(pack_ranges(pack), *columns, trees=trees, edges=batch.edges)
        if documents.label_counts is not None:
            raise InvalidPlanError(
                f"{pack.direction} pack {pack.index} is shared by ranks, and labels of documents count several times, "
                "because sequences of a group are equal; use parallel.cp = 1 and plan.options.dp_merge = false"
            )
        rank = self._groups[shared.block].rank
        ranges = shared.ranges(rank)
        edges = np.array([(start, stop) for _, start, stop in ranges], dtype=np.int64).reshape(-1, 2)
        columns = collate_ranges([doc_id for doc_id, _, _ in ranges], edges[:, 0], edges[:, 1], documents)
        attention: PackAttention | None = None
        states: SharedStates | None = None
        if shared.shared:
            group, label = self._groups[shared.block], f"{pack.direction} pack {pack.index}"
            if self._exchange == "ring":
                attention = RingAttention(shared, group, label)
            else:
                attention = GatherAttention(shared, group, label, self._device)
            states = SharedStates(shared, group, label)
        tokens = self._on_device(columns)
        return PackTokens(ranges, *tokens, shared=attention, states=states, closes=shared.held(rank))

    def _on_device(self, columns: Iterable[NDArray[np.int64]]) -> tuple[Tensor, Tensor, Tensor]:
        ids, targets, positions = (to_device(torch.from_numpy(column), self._device) for column in columns)
        return ids, targets, positions

    def _shared(self, pack: MicroPack) -> PackRows | None:
        return None if self._rows is None else self._rows.of_pack(pack)


def pack_ranges(pack: MicroPack) -> tuple[Range, ...]:
    return tuple(Range(s.doc_id, s.start, pack.pad_to or s.stop) for s in pack.slices)
