"""Bytes of packs of which some slices lie whole on one rank of a context-parallel group (DACP).

Ranks then hold different documents, and `PipelineTasks` has one column for all: we take, pack by pack, what the
fullest rank holds. Exact for packs that are freed before the next one starts (pp = 1), else an upper bound.
"""

import dataclasses
import itertools

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
    cp = layout.cp
    held = pipeline_bytes(
        model,
        layout,
        _all_ranks(forward, owners[0], cp, len(num_tokens)),
        _all_ranks(backward, owners[1], cp, len(num_tokens)),
        np.tile(num_tokens, cp),
        None if policy is None else np.tile(policy, cp),
    )
    fullest = {
        field.name: getattr(held, field.name).reshape(cp, -1, layout.num_stages).max(axis=0)
        for field in dataclasses.fields(PipelineBytes)
        if field.name != "static_bytes"
    }
    return PipelineBytes(static_bytes=held.static_bytes, **fullest)


def _all_ranks(columns: SliceColumns, owner: NDArray[np.int64], cp: int, num_documents: int) -> SliceColumns:
    """The views of all ranks, one after the other, each with packs and documents of its own: priced in one call."""
    rank, piece = np.nonzero((owner == np.arange(cp)[:, None]) | (owner < 0))
    pack = rank * columns.num_packs + columns.pack_of_slice()[piece]
    counts = np.bincount(pack, minlength=cp * columns.num_packs)
    return SliceColumns(
        doc=(columns.doc[piece] + rank * num_documents).astype(np.int32),
        start=columns.start[piece],
        stop=columns.stop[piece],
        pack_offset=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        pad_to=np.tile(columns.pad_to, cp),
        cp=None if columns.cp is None else columns.cp[piece],
    )


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
    names, edges = [str(rank) for rank in owner.tolist()], columns.pack_offset.tolist()
    return tuple(OWNED + ",".join(names[low:high]) for low, high in itertools.pairwise(edges))


def owners_from(shardings: list[str]) -> NDArray[np.int64] | None:
    """Inverse of `owned_sharding`; None where no pack has owners."""
    if not any(sharding.startswith(OWNED) for sharding in shardings):
        return None
    return np.array(
        [int(owner) for sharding in shardings for owner in sharding.removeprefix(OWNED).split(",") if owner], np.int64
    )
