"""`document_layer_spec`: layers of Megatron-Core that train packs without Transformer Engine.

Megatron-Core's own attention takes no packed documents ("Packed sequence is not supported by DotProductAttention");
Transformer Engine's does, where it is installed. This module puts Evenload's attention in its place
(`document_attention`): each document attends to itself alone. Norms are torch's. For machines without Transformer
Engine, and for tests; where it is installed, its layers are faster (fused norms, no copies), and
`get_gpt_layer_with_transformer_engine_spec` stays the right choice.
"""

import math
from typing import Any

import torch
from torch import Tensor

from evenload.errors import ConfigError
from evenload.integrations.engines.document_attention import document_attention

_PLAIN_ATTENTION = {
    "attention_dropout": 0.0,
    "window_size": None,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "qk_clip": False,
}
"""Settings of a `TransformerConfig` that change attention, with the values under which it is that of this module."""


def document_layer_spec(config: Any) -> Any:
    """A `ModuleSpec` of GPT layers whose attention reads `PackedSeqParams`, for `GPTModel(transformer_layer_spec=...)`.

    Args:
        config: the model's `TransformerConfig`.

    Raises:
        ConfigError: a setting of attention that these layers do not have.
    """
    for name, plain in _PLAIN_ATTENTION.items():
        if getattr(config, name) != plain:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, and document_layer_spec has no such attention; set it to {plain}, "
                "or use Transformer Engine's layers"
            )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[missing-import]

    spec: Any = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    spec.submodules.self_attention.submodules.core_attention = DocumentAttention
    return spec


class DocumentAttention(torch.nn.Module):
    """Causal attention inside each document of a pack, in the place of `TEDotProductAttention`.

    Args:
        config: the model's `TransformerConfig`.
        softmax_scale: factor of q·k; None = 1 / sqrt(head dimension).
        settings: what else Megatron-Core builds attention with, none of which changes it.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **settings: Any) -> None:
        super().__init__()
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
    ) -> Tensor:
        """Attention of one pack.

        Args:
            query: [T, H, D]; key, value: [T, G, D]. settings: of them `packed_seq_params` with cumulative lengths.

        Returns:
            [T, H · D].

        Raises:
            ConfigError: the batch is not a pack.
        """
        packed = settings.get("packed_seq_params")
        if packed is None or packed.qkv_format != "thd" or attention_mask is not None:
            raise ConfigError(
                "document_layer_spec trains packs only; hand packed_seq_params of a batch to the model, and no "
                "attention_mask"
            )
        return document_attention(query, key, value, _edges(packed), self.scale).flatten(1)


def _edges(packed: Any) -> tuple[int, ...]:
    """Cumulative lengths on the host, which waits for the device once a pack and not once a layer."""
    if not hasattr(packed, "evenload_edges"):
        packed.evenload_edges = tuple(packed.cu_seqlens_q.tolist())
    return packed.evenload_edges
