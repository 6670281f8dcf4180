"""Transformers' configuration of a model that is given as `evenload plan --model` takes it, and a few of its layers.

A built-in name has no config.json; its shape says all that a configuration with random weights, which is only timed,
needs.
"""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from evenload.data.hub import model_from
from evenload.runtime.model.configured import load_config
from evenload.runtime.model.supported import check_supported
from evenload.types.architectures import ARCHITECTURES
from evenload.types.model import MODEL_TYPES, MODELS, ModelSpec, model_from_hf_config


def config_from(name_or_path: str) -> PretrainedConfig:
    """Return the configuration of a built-in model, a `config.json` or its folder; a `ConfigError` where it is neither,
    an `UnsupportedModelError` for an architecture or option that the runtime does not train."""
    model_from(name_or_path)  # says best what is wrong with a name
    return _of_built_in(name_or_path) if name_or_path in MODELS else load_config(name_or_path)


def _of_built_in(name: str) -> PretrainedConfig:
    model, architecture = MODELS[name], ARCHITECTURES[MODEL_TYPES[name]]
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if model.position_rows:
        sizes["max_position_embeddings"] = model.position_rows
    sizes |= dict.fromkeys(architecture.dropouts, 0.0)
    if any(model.windows):
        sizes["sliding_window"] = max(model.windows)
    if model.num_experts:
        # Mixtral's and Qwen's names of the same numbers.
        sizes |= {"num_experts": model.num_experts, "num_local_experts": model.num_experts}
        sizes |= {"moe_intermediate_size": model.ffn_hidden_size, "num_experts_per_tok": model.experts_per_token}
    config = AutoConfig.for_model(
        MODEL_TYPES[name], **{architecture.keys.get(key, key): value for key, value in sizes.items()}
    )
    check_supported(config)
    return config


def with_few_layers(config: PretrainedConfig, windows: tuple[int, ...], stages: int, most: int) -> PretrainedConfig:
    """A copy with the same layers, but at most `most` a stage, alike on every stage, one of each attention window
    (0 = full) first."""
    first_of_kind = [windows.index(window) for window in dict.fromkeys(windows)]
    others = [layer for layer in range(len(windows)) if layer not in first_of_kind]
    chosen = sorted((first_of_kind + others)[: max(len(first_of_kind), min(most, len(windows) // stages))])
    tree = config.to_dict()
    tree[check_supported(config).layers_key] = len(chosen) * stages
    if tree.get("layer_types"):
        tree["layer_types"] = [tree["layer_types"][layer] for layer in chosen] * stages
    # How many layers have a window; the kinds of layers say it already.
    if tree.get("max_window_layers") is not None:
        tree["max_window_layers"] = len(chosen) * stages
    return type(config).from_dict(tree)


def spec_of(config: PretrainedConfig, name: str, bytes_per_element: int) -> ModelSpec:
    return model_from_hf_config(config.to_dict(), name, bytes_per_element)
