"""Bytes of packs of which some slices lie whole on one rank of a context-parallel group (DACP).

Ranks then hold different documents, and `PackBytes` has one column for all: we take, pack by pack, what the
fullest rank holds. Exact for packs that are freed before the next one starts (pp = 1), else an upper bound.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from evenload.cost.memory import pipeline_bytes
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import PackBytes


def owned_pipeline_bytes(
    model: ModelSpec,
    layout: ParallelLayout,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8] | None,
    owners: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> PackBytes:
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
        name: getattr(held, name).reshape(cp, -1, layout.num_stages).max(axis=0) for name in PackBytes.pack_columns()
    }
    return PackBytes(static_bytes=held.static_bytes, **fullest)


def _all_ranks(columns: SliceColumns, owner: NDArray[np.int64], cp: int, num_documents: int) -> SliceColumns:
    """The views of all ranks, one after the other, each with packs and documents of its own: priced in one call."""
    rank, piece = np.nonzero((owner == np.arange(cp)[:, None]) | (owner < 0))
    packs = rank * columns.num_packs + columns.pack_of_slice()[piece]
    view = columns.taken(piece, packs, cp * columns.num_packs)
    return dataclasses.replace(view, doc=(view.doc + rank * num_documents).astype(np.int32))


def rank_view(columns: SliceColumns, owner: NDArray[np.int64], rank: int) -> SliceColumns:
    """The packs, never padded, as one rank sees them: its own slices and the shared ones."""
    return columns.assigned((owner == rank) | (owner < 0), columns.pack_of_slice(), columns.num_packs)
