"""A `ModelSpec` from a Hugging Face configuration, without a number being wrong.

Known are the architectures of `types.architectures`. All others are refused by name, and so are fields that change what
a layer costs, in whatever configuration they stand: a model read wrong is planned wrong without a sign.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from evenload.errors import ConfigError
from evenload.types.architectures.architecture import Architecture
from evenload.types.architectures.registry import ARCHITECTURES
from evenload.types.model import ModelSpec

_NESTED = {one.nested_in: one.model_type for one in ARCHITECTURES.values() if one.nested_in}

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


def model_from_hf_config(config: Mapping[str, Any], name: str, bytes_per_element: int = 2) -> ModelSpec:
    """Read a Hugging Face `config.json`.

    Args:
        config: the parsed JSON object.
        name: shown to users.
        bytes_per_element: of the compute precision.

    Raises:
        ConfigError: a needed key is missing, or an architecture, or a field, that would be costed wrong.
    """
    config, architecture = _decoder(config, name)
    hidden = _needed(config, "hidden_size", name)
    heads = _needed(config, "num_attention_heads", name)
    layers = _needed(config, "num_hidden_layers", name)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = (config.get("moe_intermediate_size") if experts else None) or config.get("intermediate_size")
    if inner is None and architecture.ffn_factor:
        inner = architecture.ffn_factor * hidden
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn_hidden_size=_needed({"intermediate_size": inner}, "intermediate_size", name),
        vocab_size=_needed(config, "vocab_size", name),
        # A key that has its default value is often missing in a config.json.
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture.tied)),
        gated_ffn=architecture.gated,
        num_experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        sliding_windows=_sliding_windows(config, architecture, layers),
        post_norm=architecture.post_norm,
        biases=architecture.biases,
        position_rows=_needed(config, "max_position_embeddings", name) if architecture.names.positions else 0,
        causal=architecture.causal,
        bytes_per_element=bytes_per_element,
    )


def _decoder(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], Architecture]:
    """The part of a configuration that describes a decoder, by the usual names of its keys, and its architecture."""
    outer = config.get("model_type")
    if outer in _NESTED and isinstance(config.get("text_config"), Mapping):
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {"model_type": _NESTED[outer], **tied, **config["text_config"]}
    model_type = config.get("model_type")
    found = list(_costly(config))
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        why = f", and its config.json has {'; '.join(found)}" if found else ""
        named = (
            "names no model_type" if model_type is None else f"has model_type '{model_type}', which is not known{why}"
        )
        raise ConfigError(
            f"model {name}: config.json {named}, so its work and memory cannot be told; known: "
            f"{', '.join(sorted({*ARCHITECTURES, *_NESTED}))}. A config.json of your own with the model_type whose "
            "layers come closest ('llama', or 'mixtral' with experts) is planned as that"
        )
    if found:
        raise ConfigError(
            f"model {name}: config.json of model_type '{model_type}' has {'; '.join(found)}, which the cost model does "
            "not describe, so that plans would be wrong; without these fields it is planned as if they were not there"
        )
    renamed = {usual: config[own] for usual, own in architecture.keys.items() if config.get(own) is not None}
    return {**architecture.defaults, **config, **renamed}, architecture


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


def _needed(config: Mapping[str, Any], key: str, name: str) -> int:
    if not isinstance(config.get(key), int):
        raise ConfigError(f"model {name}: config.json has no integer '{key}'; is it a decoder's config?")
    return config[key]


def _sliding_windows(config: Mapping[str, Any], architecture: Architecture, layers: int) -> tuple[int, ...]:
    """Window per layer as transformers applies it (`layer_types` first, else by the architecture's pattern)."""
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", not architecture.optional_window):
        return ()
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return architecture.windows(config, window, layers)
