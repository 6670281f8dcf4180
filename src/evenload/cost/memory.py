"""Bytes a pipeline rank holds, mirroring the runtime's own accounting.

Kept between forward and backward (e = bytes per element, L = layers of the stage, T = tokens):

    chunk     per (document, forward slice), from that forward's start:
              T·L·(e·(hidden + (Hq+2·Hkv)·D + Hq·D + hidden + 2·ffn) + Hq·lse)   layer input, q k v outputs,
              attention output, o_proj output, gate and up; lse: 4 bytes a head and token (8 when e is 8);
              last stage + T·e·hidden (final hidden states).
              Freed when the backward slice that contains the chunk's FIRST token ends: no earlier, because
              backward cuts differ from forward cuts and a chunk is one tensor.
    K and V   whole document, T·L·e·2·Hkv·D, from its first forward slice until the backward slice with
              start 0 ends (rope applied, contiguous for the attention kernel).
    dK and dV whole document, T·L·4·2·Hkv·D (8 when e is 8), only for documents cut in BACKWARD, from the first
              backward slice until the slice with start 0 ends: fp32 sums over slices.

dK/dV are allocated by a backward and outlive it. `PipelineTasks` has no "allocated by backward" column, so they
are counted as negative `backward_freed_bytes` of that pack (it gives back less than it takes, the sum may be
below zero) plus the same amount in its `backward_temp_bytes`, so that the peak inside the pack is right too.

Padded packs count `pad_to` tokens for every document. Over a step kept == freed on every stage.

Temporaries are ESTIMATES (the allocator and fused kernels decide):
    forward   the pack's layer input, norm output, attention input/output and the gated product of one layer
    backward  one layer's recomputed activations and gradients; on the last stage logits in compute precision
              and their fp32 softmax and gradient, a block of HEAD_ROWS rows at a time: min(T, HEAD_ROWS)·vocab·(e + 8)

Static bytes of a rank: weights e·N, fp32 gradients max(e,4)·N, and AdamW's state sharded over dp: fp32 master
(only where e < 4) and two moments, max(e,4) bytes each.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

HEAD_ROWS = 2048
"""Rows of logits the runtime holds at once; bounds the head's memory whatever the pack."""


@dataclass(frozen=True, eq=False)
class PipelineBytes:
    """The byte columns of `PipelineTasks`, same shapes and meaning."""

    static_bytes: NDArray[np.int64]
    forward_kept_bytes: NDArray[np.int64]
    forward_temp_bytes: NDArray[np.int64]
    backward_freed_bytes: NDArray[np.int64]
    backward_temp_bytes: NDArray[np.int64]


def activation_bytes_per_token(model: ModelSpec) -> int:
    """Bytes one token leaves on ONE layer between forward and backward, without K and V."""
    element = model.bytes_per_element
    query, key_value = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    ffn = (2 if model.gated_ffn else 1) * model.ffn_hidden_size * max(1, model.experts_per_token)
    outputs = model.hidden_size + (query + 2 * key_value) + query + model.hidden_size + ffn
    return element * outputs + model.num_heads * _accumulator_bytes(model)


def kv_bytes_per_token(model: ModelSpec) -> int:
    """Bytes of one token's K and V on ONE layer."""
    return model.bytes_per_element * 2 * model.num_kv_heads * model.head_dim


def kv_gradient_bytes_per_token(model: ModelSpec) -> int:
    """Bytes of one token's dK and dV sums on ONE layer."""
    return _accumulator_bytes(model) * 2 * model.num_kv_heads * model.head_dim


def parameters_per_rank(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Stored parameters of every pipeline rank; int64[R].

    A tied head on another rank than the embedding is a second copy, as in the runtime.
    """
    parameters = np.zeros(layout.pp, np.int64)
    for (first, last), rank in zip(layout.stage_layers, layout.stage_to_rank, strict=True):
        parameters[rank] += (last - first) * model.stored_parameters_per_layer
    first_rank, last_rank = layout.stage_to_rank[0], layout.stage_to_rank[-1]
    parameters[first_rank] += model.embedding_parameters
    parameters[last_rank] += model.hidden_size  # the final norm
    if not (model.tied_embeddings and first_rank == last_rank):
        parameters[last_rank] += model.embedding_parameters
    return parameters


def static_bytes(model: ModelSpec, layout: ParallelLayout) -> NDArray[np.int64]:
    """Weights, gradients and optimizer state of every pipeline rank; int64[R]."""
    element = model.bytes_per_element
    parameters = parameters_per_rank(model, layout)
    optimizer = ((4 if element < 4 else 0) + 2 * max(element, 4)) * -(-parameters // layout.dp)
    return parameters * (element + max(element, 4)) + optimizer


def pipeline_bytes(
    model: ModelSpec,
    layout: ParallelLayout,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
) -> PipelineBytes:
    """All byte columns of one replica.

    Args:
        forward, backward: the replica's packs.
        num_tokens: int64[num_documents] of the replica's documents, without padding.
    """
    layers = np.array([last - first for first, last in layout.stage_layers], np.int64)
    is_last = np.arange(len(layers)) == len(layers) - 1
    chunk_per_token = layers * activation_bytes_per_token(model) + is_last * model.bytes_per_element * model.hidden_size
    kv_per_token = layers * kv_bytes_per_token(model)
    kv_gradient_per_token = layers * kv_gradient_bytes_per_token(model)

    forward_pack, backward_pack = forward.pack_of_slice(), backward.pack_of_slice()
    forward_tokens, backward_tokens = _slice_tokens(forward, forward_pack), _slice_tokens(backward, backward_pack)
    document_tokens = _document_tokens(forward, forward_pack, num_tokens)

    first_forward = forward.start == 0
    kept_chunks = _pack_sums(forward_pack, forward_tokens, forward.num_packs)
    kept_kv = _pack_sums(forward_pack, np.where(first_forward, document_tokens[forward.doc], 0), forward.num_packs)

    # A document cut in backward has a slice with start > 0.
    last_backward = backward.start == 0
    is_cut = np.zeros(len(num_tokens), bool)
    is_cut[backward.doc[~last_backward]] = True
    cut_tokens = np.where(is_cut[backward.doc], document_tokens[backward.doc], 0)
    opens = backward.stop == num_tokens[backward.doc]
    opened = _pack_sums(backward_pack, np.where(opens, cut_tokens, 0), backward.num_packs)
    closed = _pack_sums(backward_pack, np.where(last_backward, cut_tokens, 0), backward.num_packs)

    freeing_pack = _backward_pack_of_first_token(forward, backward, backward_pack)
    freed_chunks = _pack_sums(freeing_pack, forward_tokens, backward.num_packs)
    freed_kv = _pack_sums(backward_pack, np.where(last_backward, document_tokens[backward.doc], 0), backward.num_packs)

    element = model.bytes_per_element
    forward_temp = element * (4 * model.hidden_size + model.ffn_hidden_size)
    backward_pack_tokens = _pack_sums(backward_pack, backward_tokens, backward.num_packs)
    return PipelineBytes(
        static_bytes=static_bytes(model, layout),
        forward_kept_bytes=np.outer(kept_chunks, chunk_per_token) + np.outer(kept_kv, kv_per_token),
        forward_temp_bytes=np.outer(kept_chunks, np.full(len(layers), forward_temp, np.int64)),
        backward_freed_bytes=np.outer(freed_chunks, chunk_per_token)
        + np.outer(freed_kv, kv_per_token)
        + np.outer(closed - opened, kv_gradient_per_token),
        backward_temp_bytes=backward_temp_estimate(model, layout, backward_pack_tokens)
        + np.outer(opened, kv_gradient_per_token),
    )


def backward_temp_estimate(
    model: ModelSpec, layout: ParallelLayout, pack_tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Temporaries of backward packs, the estimated part; int64[num_packs, P].

    Args:
        pack_tokens: int64[num_packs] tokens as computed, padding included.
    """
    element, stages = model.bytes_per_element, layout.num_stages
    per_token = element * (6 * model.hidden_size + 4 * model.ffn_hidden_size)
    is_last = np.arange(stages) == stages - 1
    logits_per_row = is_last * model.vocab_size * (element + 8)
    return np.outer(pack_tokens, np.full(stages, per_token, np.int64)) + np.outer(
        np.minimum(pack_tokens, HEAD_ROWS), logits_per_row
    )


def _accumulator_bytes(model: ModelSpec) -> int:
    """fp32 sums, float64 where the model itself is float64."""
    return 8 if model.bytes_per_element == 8 else 4


def _pack_sums(pack: NDArray[np.int64], values: NDArray[np.int64], num_packs: int) -> NDArray[np.int64]:
    """Exact below 2**53, far above any token count."""
    return np.bincount(pack, weights=values, minlength=num_packs).astype(np.int64)


def _slice_tokens(columns: SliceColumns, pack: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of every slice as computed, padding included."""
    pad_to = columns.pad_to[pack]
    return np.where(pad_to > 0, pad_to, columns.stop - columns.start)


def _document_tokens(
    forward: SliceColumns, forward_pack: NDArray[np.int64], num_tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Tokens of every document as stored: padded documents are stored with their padding."""
    tokens = num_tokens.copy()
    pad_to = forward.pad_to[forward_pack]
    padded = pad_to > 0
    tokens[forward.doc[padded]] = pad_to[padded]
    return tokens


def _backward_pack_of_first_token(
    forward: SliceColumns, backward: SliceColumns, backward_pack: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64[num_forward_slices]: the backward pack whose slice of that document contains the chunk's first token.

    One sorted search: backward slices sorted by (document, start); the containing one is the last whose key is
    not above (document, chunk start).
    """
    span = 1 + max(int(forward.stop.max(initial=0)), int(backward.stop.max(initial=0)))
    keys = backward.doc.astype(np.int64) * span + backward.start
    order = np.argsort(keys, kind="stable")
    wanted = forward.doc.astype(np.int64) * span + forward.start
    return backward_pack[order[np.searchsorted(keys[order], wanted, side="right") - 1]]
