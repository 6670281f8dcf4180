"""Replay: run an unmodified Hugging Face decoder layer forward once, and backward over *other* token ranges.

In the forward pack every linear (`nn.Linear`, GPT-2's `Conv1D`) and the attention of a layer record their
outputs per token. A backward pack runs the same layer again on its own ranges with the recorded outputs in
place of matrix products and attention, so only norms, rotary embedding and activations are recomputed;
autograd then walks this cheap graph. Weight gradients go straight into the fp32 (fp64) buffer `weight.main_grad`, or
are deferred to a later action (`weight_products.py`).

Documents under the policy `recompute` have no recorded products of linears: the backward pack makes
these again, for the rows of such documents only. Attention is recorded under every policy.
Cost: measured against plain autograd in benchmarks/replay.py.

Source: our own; the closest published relative is SlimPack's regrouping of slices in backward (§4.2),
which does not say how activations are shared between the two cuts.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from evenload.attention.range_attention import PackedGradients, Scoring
from evenload.runtime.model.lora import is_adapter
from evenload.runtime.replay.context_attention import AttentionCall
from evenload.runtime.replay.experts import ReplayExperts, ReplayRouter
from evenload.runtime.replay.known_output import known_output
from evenload.runtime.replay.linear import ReplayConv1D, ReplayLinear
from evenload.runtime.replay.state import ReplayState
from evenload.types.architectures.architecture import Architecture

_RECORDED: dict[type, type[nn.Module]] = {nn.Linear: ReplayLinear, Conv1D: ReplayConv1D}
"""The recording class of a linear."""

ATTENTION_NAME = "evenload_range"
"""Name under which the attention function is registered with transformers."""


def _attend(q: Tensor, k: Tensor, v: Tensor, state: ReplayState, layer: int, scoring: Scoring) -> Tensor:
    """q [T, H, D], k and v [T, G, D] of all ranges of a pack -> output [T, H, D]."""
    store, attention, shared = state.store, state.attention, state.shared
    assert store is not None
    call = AttentionCall(state.backend, store, layer, scoring)
    if state.mode == "record":
        if shared is not None:
            out, lse = shared.forward(call, q, k, v)
        else:
            store.record_pack_keys(layer, k, v)
            out, lse = call.backend.forward(q, call.key_ranges(attention.ranges), scoring)
        store.record((layer, "attention"), out)
        store.record((layer, "lse"), lse)
        return out
    out, lse = store.read((layer, "attention"), state.ranges), store.read((layer, "lse"), state.ranges)
    queries, key_shape = q.detach(), k.shape

    def backward(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad = grad.contiguous()
        if shared is not None:
            return shared.backward(call, grad, queries, out, lse)
        parts = call.backend.backward(grad, queries, call.key_ranges(attention.ranges), out, lse, scoring)
        if isinstance(parts, PackedGradients) and attention.is_whole(store):
            # Keys are the pack's own rows, in its order, and nobody else adds to their gradients.
            return parts.q, parts.keys, parts.values
        dq, dk, dv = torch.empty_like(queries), *(lse.new_empty(key_shape) for _ in range(2))
        attention.add_gradients(call, parts, (dq, dk, dv))
        return dq, dk.to(queries.dtype), dv.to(queries.dtype)

    return known_output(out, backward, q, k, v)


def _hf_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, G, T, D] -> [1, T, H, D]."""
    state: ReplayState = module.replay  # type: ignore[assignment]
    assert attention_mask is None, "document boundaries come from the plan, never from a mask"
    assert dropout == 0.0, "refused when the model was loaded"
    assert (softcap or 0.0) == state.backend.soft_cap, "a backend is selected with the model's soft cap"
    # Not `t[0]`: in backward that fills a tensor with zeros and copies the gradient into it.
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    layer: int = module.layer_idx  # type: ignore[assignment]
    return _attend(q, k, v, state, layer, Scoring(scaling, sliding_window or 0))[None], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _hf_attention)


def make_replayable(layer: nn.Module, layer_index: int, state: ReplayState, architecture: Architecture) -> None:
    """Turn a decoder layer's linears, experts and attention into recording ones, in place."""
    classes = architecture.classes
    mixed_in = {f"{classes}TopKRouter": ReplayRouter, f"{classes}Experts": ReplayExperts}
    for name, module in layer.named_modules():
        if is_adapter(name):
            continue  # thin products, computed again under autograd in backward
        own = type(module)
        if own in _RECORDED:
            module.__class__ = _RECORDED[own]
            module.output_unused = name.removesuffix(".base_layer") in architecture.unused_outputs  # type: ignore[assignment]
        elif own.__name__ in mixed_in:
            module.__class__ = type(f"Replay{own.__name__}", (mixed_in[own.__name__], own), {})
        elif not hasattr(module, "layer_idx"):
            continue
        module.replay, module.site = state, (layer_index, name)  # type: ignore[assignment]
