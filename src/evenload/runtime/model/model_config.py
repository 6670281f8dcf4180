"""Read the `config.json` of the configured model, or take that of a built-in one, for transformers and the cost model.
Options that would be trained wrong without a sign are refused by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from evenload.config.sections import with_adapters
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig
from evenload.data.hub import is_hub_name, local_path, model_from_config
from evenload.errors import ConfigError, UnsupportedModelError, did_you_mean
from evenload.runtime.model.layer_kinds import text_part
from evenload.runtime.model.weight_files import dequantise_once
from evenload.types.model import CONFIGURATIONS, ModelSpec


def with_few_layers(config: PretrainedConfig, kinds: tuple[int, ...], stages: int, most: int) -> PretrainedConfig:
    """Return a copy with at most `most` layers a stage, alike on every stage, with one of each kind."""
    first_of_kind = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    others = [layer for layer in range(len(kinds)) if layer not in first_of_kind]
    chosen = sorted((first_of_kind + others)[: max(len(first_of_kind), min(most, len(kinds) // stages))])
    tree = config.to_dict()
    tree[own_key(config, "num_hidden_layers")] = len(chosen) * stages
    for key, value in tree.items():
        if isinstance(value, list) and len(value) == len(kinds):  # `layer_types` and the like
            tree[key] = [value[layer] for layer in chosen] * stages
    if tree.get("max_window_layers") is not None:
        tree["max_window_layers"] = len(chosen) * stages
    if tree.get("first_k_dense_replace") is not None:
        tree["first_k_dense_replace"] = sum(layer < tree["first_k_dense_replace"] for layer in chosen)
    return type(config).from_dict(tree)


def spec_of(config: PretrainedConfig, name: str, bytes_per_element: int) -> ModelSpec:
    return model_from_config(config.to_dict(), name, bytes_per_element)


def load_config(path: str) -> PretrainedConfig:
    """Read the model's configuration from a directory, a `config.json`, or a name on the Hub, of a model of text and
    pictures its text part's, or take a built-in one; `ConfigError` where there is none, `UnsupportedModelError` for an
    architecture or option that replay does not run exactly."""
    if path in CONFIGURATIONS:
        config = AutoConfig.for_model(**CONFIGURATIONS[path])
        require_trainable(config)
        return config
    local = Path(local_path(path, "model.path"))
    file = local / "config.json" if local.is_dir() else local
    if not file.is_file():
        raise ConfigError(
            f"model.path '{path}': no config.json there; {did_you_mean(path, CONFIGURATIONS, 0.6)}give a Hugging "
            "Face directory, its config.json, or a name on the Hub such as 'Qwen/Qwen3-0.6B'"
        )
    try:
        # Code in a model's directory is never run.
        named = file.parent if file.name == "config.json" else file
        config = AutoConfig.from_pretrained(named, trust_remote_code=False)
    except Exception as error:  # transformers has no common class
        why = " ".join(str(error).split())
        raise ConfigError(f"model.path '{path}': transformers cannot read {file.name} ({why})") from error
    require_trainable(config)
    return text_part(config)


def model_spec(config: TrainConfig) -> ModelSpec:
    """Return the configured model for the cost model; errors as `load_config` and `require_positions`."""
    hf = load_config(config.model.path)
    require_positions(hf, config.data.max_document_tokens)
    path = Path(config.model.path)
    name = path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    name = config.model.path if is_hub_name(config.model.path) else name
    spec = model_from_config(hf.to_dict(), name, BYTES_PER_ELEMENT[config.model.dtype])
    return with_adapters(config.with_run_memory(spec), config.model.lora)


TESTED = {
    "cohere2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt2", "gpt_oss",
    "granite", "granite_swa", "llama", "llama4_text", "longcat_flash", "mimo_v2_flash", "minimax_m2", "ministral3",
    "mistral", "mixtral", "olmo2", "olmo3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3",
}  # fmt: skip
"""Model types whose gradients our tests compare with transformers' own (test_replay, test_attention_call,
test_tensor_families)."""


def proof_line(config: PretrainedConfig) -> str:
    """State what shows that a model, which the proof at start has passed, is trained as transformers would."""
    kind = config.get_text_config(decoder=True).model_type
    if kind in TESTED:
        return f"model type {kind}: gradients are compared with transformers' own in our tests"
    return (
        f"model type {kind}: unproven by our tests, probed at start (docs/decoders.md); evenload check compares yours"
    )


# Rotary variants that change with the length of the batch would make a token depend on its pack.
_CHANGING_ROPE = {"dynamic", "longrope"}


def require_trainable(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError` for an option of a configuration that is not trained; what a model computes is
    looked at when it is made (`structure`, `probe`)."""
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else type(quantised).__name__
        raise UnsupportedModelError(
            f"config.json has a quantization_config ({method}): quantised weights are not trained; for random ones "
            f"remove the key. {dequantise_once(config.name_or_path or 'DIRECTORY', method)}"
        )
    for rope in rope_settings(config):
        if (kind := rope.get("rope_type", "default")) in _CHANGING_ROPE:
            raise UnsupportedModelError(
                f"rope_type '{kind}' changes with the batch's length, so with a token's pack; choose a fixed one"
            )
    if getattr(config, "add_cross_attention", None):
        raise UnsupportedModelError(
            "add_cross_attention is set, and no document has an encoder's output; set it to false in config.json"
        )


def own_key(config: PretrainedConfig, key: str) -> str:
    """Return what a configuration calls a usual key."""
    return config.attribute_map.get(key, key)


def _has_position_table(config: PretrainedConfig) -> bool:
    return getattr(config, "rope_parameters", None) is None


def require_positions(config: PretrainedConfig, max_document_tokens: int) -> None:
    """Raise `ConfigError` where documents may be longer than a model's table of learned positions."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or not _has_position_table(config) or max_document_tokens <= known:
        return
    key = own_key(config, "max_position_embeddings")
    raise ConfigError(
        f"documents may have up to {max_document_tokens:,} tokens (data.max_document_tokens), but "
        f"{_name_of(config)} has a learned position for {known:,} tokens only ({key} in config.json); set "
        f'data.max_document_tokens = {known} with data.overlong = "split" (or "truncate", "drop"), or raise {key} and '
        "train from random weights"
    )


def position_warning(config: PretrainedConfig, max_document_tokens: int) -> str:
    """Return a warning where documents may be longer than the model's rotary positions reach; "" = they are not."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or _has_position_table(config):
        return ""
    for rope in rope_settings(config):
        reach = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
        known = max(known, int(reach))
    if max_document_tokens <= known:
        return ""
    return (
        f"documents may have up to {max_document_tokens:,} tokens (data.max_document_tokens), and config.json says "
        f"max_position_embeddings = {config.max_position_embeddings:,}: weights trained so far have seen no later "
        "position. To keep within what the model knows, lower data.max_document_tokens with data.overlong = "
        '"split"; to lengthen its context, set max_position_embeddings (and rope scaling) in config.json'
    )


def router_aux_loss_coef(config: PretrainedConfig, chosen: float | None) -> float:
    """Return the factor of the load-balancing loss, 0 = not trained, of which `chosen` is `model.router_aux_loss_coef`.
    `ConfigError`: the model has no router, or neither `chosen` nor `output_router_logits` of config.json decides."""
    if not hasattr(config, "router_aux_loss_coef"):
        if chosen:
            raise ConfigError(
                f"model.router_aux_loss_coef is {chosen}, but transformers has no load-balancing loss for "
                f"{_name_of(config)}"
            )
        return 0.0
    if chosen is not None:
        if chosen < 0:
            raise ConfigError(f"model.router_aux_loss_coef is {chosen}, must be 0 or more")
        return chosen
    if config.output_router_logits:
        return float(config.router_aux_loss_coef)
    raise ConfigError(
        f"{_name_of(config)} has experts, and its config.json does not set output_router_logits, so transformers "
        "would train it without a load-balancing loss; decide: model.router_aux_loss_coef = "
        f"{config.router_aux_loss_coef} (its config.json's) trains one, 0 trains none"
    )


def _name_of(config: PretrainedConfig) -> str:
    return type(config).__name__.removesuffix("Config")


def rope_settings(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary settings of the model, or of every kind of layer where they differ (Gemma 3)."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)]
    return kinds or [parameters]
