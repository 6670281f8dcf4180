"""Packs of which a rank computes no rows: it takes part in their transfers all the same."""

from torch import Tensor

from evenload.attention.range_attention import RangeAttention, Scoring, work_dtype
from evenload.runtime.model.hf_model import StageModel
from evenload.runtime.replay.context_attention import AttentionCall, PackAttention
from evenload.runtime.replay.store import ActivationStore


def join_forward(
    shared: PackAttention | None, model: StageModel, backend: RangeAttention, store: ActivationStore, like: Tensor
) -> None:
    """Take part in the transfers of a forward pack, if it has any, of which this rank computes no rows; the others need
    it there. `like` is of the dtype and device of hidden states."""
    if shared is not None:
        for layer in model.layers:
            q, k = _no_rows(model, layer, like)
            shared.forward(AttentionCall(backend, store, layer, Scoring(1.0)), q, k, k)


def join_backward(
    shared: PackAttention | None,
    model: StageModel,
    layer: int,
    backend: RangeAttention,
    store: ActivationStore,
    like: Tensor,
) -> None:
    """As `join_forward`, of one layer."""
    if shared is not None:
        q, _ = _no_rows(model, layer, like)
        lse = q.new_empty(q.shape[:2], dtype=work_dtype(q))
        shared.backward(AttentionCall(backend, store, layer, Scoring(1.0)), q, q, q, lse)


def _no_rows(model: StageModel, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [0, H, D] and keys [0, G, D], of the heads that this rank has."""
    heads, kv_heads, dim = model.attention_heads(layer)
    return like.new_empty(0, heads, dim), like.new_empty(0, kv_heads, dim)
