"""Bytes of packs of which some slices lie whole on one rank of a context-parallel group (DACP).

Ranks then hold different documents, and `PipelineTasks` has one column for all: we take, pack by pack, what the
fullest rank holds. Exact for packs that are freed before the next one starts (pp = 1), else an upper bound.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import PipelineBytes, pipeline_bytes
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

OWNED = "dacp:"
"""How `MicroPack.sharding` of such a pack begins; owners of its slices follow, with commas, -1 = all ranks."""


def owned_pipeline_bytes(
    model: ModelSpec,
    layout: ParallelLayout,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8] | None,
    owners: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> PipelineBytes:
    """As `pipeline_bytes`, the most of any rank.

    Args:
        owners: int64[num_slices] of forward and of backward: the rank that holds a slice, -1 = all ranks.
    """
    views = [
        pipeline_bytes(
            model,
            layout,
            rank_view(forward, owners[0], rank),
            rank_view(backward, owners[1], rank),
            num_tokens,
            policy,
        )
        for rank in range(layout.cp)
    ]
    fields = [field.name for field in dataclasses.fields(PipelineBytes)]
    return PipelineBytes(**{name: np.max([getattr(view, name) for view in views], axis=0) for name in fields})


def rank_view(columns: SliceColumns, owner: NDArray[np.int64], rank: int) -> SliceColumns:
    """The packs as one rank sees them: its own slices and the shared ones."""
    mine = (owner == rank) | (owner < 0)
    counts = np.bincount(columns.pack_of_slice()[mine], minlength=columns.num_packs)
    return SliceColumns(
        doc=columns.doc[mine],
        start=columns.start[mine],
        stop=columns.stop[mine],
        pack_offset=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pad_to=columns.pad_to,
        cp=None if columns.cp is None else columns.cp[mine],
    )


def owned_sharding(columns: SliceColumns, owner: NDArray[np.int64]) -> tuple[str, ...]:
    """`MicroPack.sharding` of every pack."""
    pieces = np.split(owner, columns.pack_offset[1:-1]) if columns.num_packs else []
    return tuple(OWNED + ",".join(map(str, piece.tolist())) for piece in pieces)


def owners_from(shardings: list[str]) -> NDArray[np.int64] | None:
    """Inverse of `owned_sharding`; None where no pack has owners."""
    if not any(sharding.startswith(OWNED) for sharding in shardings):
        return None
    return np.array(
        [int(owner) for sharding in shardings for owner in sharding.removeprefix(OWNED).split(",") if owner], np.int64
    )
