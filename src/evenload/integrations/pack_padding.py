"""Padding of a loader's packs: packs without work, and packs made a multiple of some number of tokens long.

A pack without work makes a forward and a backward pass like any other, so collectives inside a model meet, and its
gradient is exactly 0. The padding at the end of a pack is a document of its own: no other document sees it, no position
goes beyond those of real documents, and it carries no loss.

Who needs a multiple: sequence parallelism of Megatron-Core splits the rows of a pack evenly over the tensor-parallel
ranks and stops at a pack that they do not divide.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from evenload.data.encoding.document_encoder import IGNORE_INDEX
from evenload.feed.collate import PADDING_TOKEN, PackBatch

_COLUMNS = ("doc_ids", "starts", "stops", "token_ids", "targets", "positions")


def zero_weight_pack(num_tokens: int = 1) -> PackBatch:
    """Padding tokens, one document, without a loss."""
    edges = np.array([0, num_tokens], np.int32)
    return PackBatch(
        doc_ids=np.array([-1], np.int64),
        starts=np.zeros(1, np.int64),
        stops=np.full(1, num_tokens, np.int64),
        token_ids=np.full(num_tokens, PADDING_TOKEN, np.int64),
        targets=np.full(num_tokens, IGNORE_INDEX, np.int64),
        positions=np.arange(num_tokens, dtype=np.int64),
        cu_seqlens_q=edges,
        cu_seqlens_k=edges,
        max_seqlen_q=num_tokens,
        max_seqlen_k=num_tokens,
        num_label_tokens=0,
        num_padding_tokens=num_tokens,
    )


def pad_pack(pack: PackBatch, multiple: int) -> PackBatch:
    """The pack with a document of padding at its end, so that its tokens are a multiple; itself where they are one."""
    missing = -pack.num_tokens % multiple
    if not missing:
        return pack
    padding = zero_weight_pack(missing)
    columns: dict[str, Any] = {name: np.concatenate([getattr(pack, name), getattr(padding, name)]) for name in _COLUMNS}
    return replace(
        pack,
        **columns,
        cu_seqlens_q=_with_end(pack.cu_seqlens_q, missing),
        cu_seqlens_k=_with_end(pack.cu_seqlens_k, missing),
        max_seqlen_q=max(pack.max_seqlen_q, missing),
        max_seqlen_k=max(pack.max_seqlen_k, missing),
        num_padding_tokens=pack.num_padding_tokens + missing,
    )


def _with_end(edges: np.ndarray, num_tokens: int) -> np.ndarray:
    return np.append(edges, edges[-1] + num_tokens).astype(edges.dtype)
