"""Which Hugging Face configurations can be read as a `ModelSpec` without a number being wrong.

A `model_type` is known here when its layers are those that `ModelSpec` describes: alike, with attention over keys and
values of every head, and one feed-forward block or one block of experts. tests/types counts the weights of every one
against transformers' own model. All others are refused by name, and so are fields that change what a layer costs, in
whatever configuration they stand: a model read wrong is planned wrong without a sign.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from evenload.errors import ConfigError


@dataclass(frozen=True)
class DecoderKind:
    """What a `model_type` says that its config.json may leave out.

    Args:
        tied: the head shares the embedding's weights where the configuration does not say.
        gated: three matrices in the feed-forward block.
        post_norm: norms behind attention and feed-forward block.
        causal: False for encoders.
        full_every: every layer whose number, from 1, this divides has no window; 0 = all have it.
        pattern_name: the field that says `full_every`, where the kind has one.
        optional_window: a window counts only with `use_sliding_window`.
        first_layers_full: the first `max_window_layers` have no window.
        names: this kind's name of a field, where it has another.
        defaults: of fields that a configuration nested in another leaves out.
    """

    tied: bool = False
    gated: bool = True
    post_norm: bool = False
    causal: bool = True
    full_every: int = 0
    pattern_name: str = ""
    optional_window: bool = False
    first_layers_full: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)


_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}
_GEMMA3_DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208}

DECODERS: Mapping[str, DecoderKind] = {
    "bert": DecoderKind(tied=True, gated=False, causal=False),
    "gemma": DecoderKind(tied=True),
    "gemma2": DecoderKind(tied=True, post_norm=True, full_every=2),
    "gemma3_text": DecoderKind(
        tied=True, post_norm=True, full_every=6, pattern_name="sliding_window_pattern", defaults=_GEMMA3_DEFAULTS
    ),
    "gpt2": DecoderKind(tied=True, gated=False, names=_GPT2_NAMES),
    "gpt_neox": DecoderKind(gated=False),
    "granite": DecoderKind(),
    "llama": DecoderKind(),
    "mistral": DecoderKind(),
    "mixtral": DecoderKind(),
    "olmo": DecoderKind(),
    "olmo2": DecoderKind(post_norm=True),
    "olmo3": DecoderKind(post_norm=True, full_every=4),
    "olmoe": DecoderKind(),
    "phi": DecoderKind(gated=False),
    "phi3": DecoderKind(),
    "qwen2": DecoderKind(optional_window=True, first_layers_full=True),
    "qwen3": DecoderKind(optional_window=True, first_layers_full=True),
    "qwen3_moe": DecoderKind(optional_window=True),
    "roberta": DecoderKind(tied=True, gated=False, causal=False),
    "seed_oss": DecoderKind(),
    "starcoder2": DecoderKind(tied=True, gated=False),
}
"""Kinds of model whose work and memory `ModelSpec` describes, by `model_type`."""

_NESTED = {"gemma3": "gemma3_text"}
"""Models of text and pictures whose decoder is a known kind, in `text_config`. The pictures' encoder is not counted."""

_COSTLY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "latent attention": ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
    "experts of another layout": ("n_routed_experts", "moe_num_experts", "num_experts_per_token"),
    "shared experts": ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"),
    "some layers dense, others with experts": ("first_k_dense_replace", "moe_layer_freq", "interleave_moe_layer_step"),
    "multi-token prediction": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "linear attention": ("linear_num_value_heads", "linear_key_head_dim", "linear_attn_config"),
    "state-space layers": ("mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size", "hybrid_override_pattern"),
    "layers of several kinds": ("layers_block_type", "block_types", "attn_layer_indices", "attn_type_list"),
    "chunked or sparse attention": ("attention_chunk_size", "index_topk", "sparse_attention_config"),
}
"""Fields that change what a layer costs, and what they stand for; absent, null, 0 and empty do no harm."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def readable_decoder(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], DecoderKind]:
    """The part of a configuration that describes a decoder, by the usual names of its fields, and its kind.

    Args:
        config: a parsed `config.json`.
        name: of the model, for messages.

    Raises:
        ConfigError: a `model_type` that is not known, or fields that change what layers cost.
    """
    outer = config.get("model_type")
    if outer in _NESTED and isinstance(config.get("text_config"), Mapping):
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {"model_type": _NESTED[outer], **tied, **config["text_config"]}
    model_type = config.get("model_type")
    found = list(_costly(config))
    kind = DECODERS.get(str(model_type))
    if kind is None:
        why = f", and its config.json has {'; '.join(found)}" if found else ""
        named = (
            "names no model_type" if model_type is None else f"has model_type '{model_type}', which is not known{why}"
        )
        raise ConfigError(
            f"model {name}: config.json {named}, so its work and memory cannot be told; known: "
            f"{', '.join(sorted({*DECODERS, *_NESTED}))}. A config.json of your own with the model_type whose layers "
            "come closest ('llama', or 'mixtral' with experts) is planned as that"
        )
    if found:
        raise ConfigError(
            f"model {name}: config.json of model_type '{model_type}' has {'; '.join(found)}, which the cost model does "
            "not describe, so that plans would be wrong; without these fields it is planned as if they were not there"
        )
    renamed = {usual: config[own] for usual, own in kind.names.items() if config.get(own) is not None}
    return {**kind.defaults, **config, **renamed}, kind


def _costly(config: Mapping[str, Any]) -> Iterator[str]:
    """Fields that change what layers cost, in words."""
    for what, fields in _COSTLY_FIELDS.items():
        present = [f"{name} {config[name]}" for name in fields if config.get(name)]
        if present:
            yield f"{what} ({', '.join(present)})"
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - _LAYER_TYPES)
    if others:
        yield f"layers that are neither full nor sliding attention (layer_types {', '.join(others)})"
    dense, step = config.get("mlp_only_layers"), config.get("decoder_sparse_step", 1)
    if dense or step not in (None, 1):
        yield f"some layers without experts (mlp_only_layers {dense or []}, decoder_sparse_step {step})"
