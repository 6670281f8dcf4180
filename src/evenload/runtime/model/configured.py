"""Which models and options are trained exactly, and a model's `config.json` as transformers and the cost model read it.

All others are refused by name: they might mix tokens of different documents, draw random numbers, or depend on the
length of the pack, and would then be trained wrong without a sign. A built-in name (`evenload plan --model`) has no
config.json; its shape says all that a configuration with random weights, which is only timed, needs.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from evenload.config.sections import with_adapters
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig
from evenload.data.hub import is_hub_name, local_path, model_from
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.types.architectures import ARCHITECTURES, TRAINED, Architecture
from evenload.types.model import MODEL_TYPES, MODELS, ModelSpec, model_from_hf_config

# Rotary variants that change with the length of the batch would make a token depend on its pack.
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


def check_supported(config: PretrainedConfig) -> Architecture:
    """What is known of the model's architecture; `UnsupportedModelError` names it, or the option that is not."""
    architecture = TRAINED.get(_causal_class(config))
    if architecture is None:
        raise UnsupportedModelError(
            f"model architecture '{_causal_class(config)}' is not supported; replay is proven equal to plain training "
            f"for {', '.join(sorted(TRAINED))}"
        )
    if (why := next(_untrained(config, architecture), None)) is not None:
        raise UnsupportedModelError(why)
    return architecture


def _untrained(config: PretrainedConfig, architecture: Architecture) -> Iterator[str]:
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else type(quantised).__name__
        yield (
            f"config.json has a quantization_config ({method}): quantised weights are not trained. Dequantise them "
            "once (transformers: from_pretrained, dequantize(), save_pretrained) and give that directory; for random "
            "weights remove the key"
        )
    noise = [(key, "a dropout mask") for key in architecture.dropouts] + [("router_jitter_noise", "the noise")]
    for key, what in noise:
        if value := getattr(config, key, 0.0):
            yield f"{key} is {value}: {what} would differ between forward and backward; set it to 0 in config.json"
    for rope in rope_settings(config):
        if (kind := rope.get("rope_type", "default")) not in _FIXED_ROPE:
            yield (
                f"rope_type '{kind}' changes with the batch's length, so a token would depend on its pack; supported: "
                f"{', '.join(sorted(_FIXED_ROPE))}"
            )
    if getattr(config, "add_cross_attention", None):
        yield (
            "add_cross_attention is set: its layers attend to an encoder, which no document has; set it to false in "
            "config.json"
        )
    if getattr(config, "use_bidirectional_attention", None):
        yield (
            "use_bidirectional_attention is set: tokens would see later ones, which slices of a document do not hold; "
            "only causal decoders are trained"
        )
    dense, step = getattr(config, "mlp_only_layers", None), getattr(config, "decoder_sparse_step", 1)
    if architecture.experts is not None and (dense or step != 1):
        yield (
            f"mlp_only_layers is {dense or []} and decoder_sparse_step is {step}: some layers have experts and others "
            "do not, which the cost model cannot describe; supported: experts in every layer"
        )


def require_adapters(config: PretrainedConfig) -> None:
    """`UnsupportedModelError` for an architecture whose linears get no adapters."""
    if why := check_supported(config).unadapted:
        raise UnsupportedModelError(
            f"model.lora is set and {_causal_class(config)} {why}; remove [model.lora] to train all weights"
        )


def require_positions(config: PretrainedConfig, max_document_tokens: int) -> None:
    """`ConfigError` where documents may be longer than a model's table of learned positions."""
    architecture = check_supported(config)
    if not architecture.names.positions or max_document_tokens <= config.max_position_embeddings:
        return
    known = config.max_position_embeddings
    key = architecture.keys.get("max_position_embeddings", "max_position_embeddings")
    raise ConfigError(
        f"documents may have up to {max_document_tokens:,} tokens (data.max_document_tokens), but "
        f"{architecture.causal_class} has a learned position for {known:,} tokens only ({key} in config.json); set "
        f'data.max_document_tokens = {known} with data.overlong = "split" (or "truncate", "drop"), or raise {key} and '
        "train from random weights"
    )


def position_warning(config: PretrainedConfig, max_document_tokens: int) -> str:
    """What to say where documents may be longer than what rotary positions are made for; "" where they are not."""
    known = getattr(config, "max_position_embeddings", None)
    if not known or check_supported(config).names.positions:
        return ""
    for rope in rope_settings(config):
        reach = (rope.get("original_max_position_embeddings") or 0) * (rope.get("factor") or 1)
        known = max(known, int(reach))
    if max_document_tokens <= known:
        return ""
    return (
        f"documents may have up to {max_document_tokens:,} tokens (data.max_document_tokens), and config.json says "
        f"max_position_embeddings = {config.max_position_embeddings:,}: weights trained so far have seen no later "
        "position. Training goes on with plain rotary positions; to keep within what the model knows, lower "
        'data.max_document_tokens with data.overlong = "split", and to lengthen its context, set '
        "max_position_embeddings (and rope scaling) in config.json"
    )


def attention_soft_cap(config: PretrainedConfig) -> float:
    """The limit that attention scores are squeezed below by a tanh; 0 = none."""
    key = check_supported(config).soft_cap_key
    return float((getattr(config, key, None) if key else None) or 0.0)


def router_aux_loss_coef(config: PretrainedConfig, chosen: float | None) -> float:
    """The factor of the load-balancing loss; 0 for a model without experts, and where it is not to be trained.
    `chosen` is `model.router_aux_loss_coef`; None = as transformers would train the model.

    Raises:
        ConfigError: the model has no router, or nobody decided: transformers trains without the loss unless config.json
            asks for router logits, which is easily missed.
    """
    if check_supported(config).experts is None:
        if chosen:
            raise ConfigError(f"model.router_aux_loss_coef is {chosen}, but {_causal_class(config)} has no experts")
        return 0.0
    if chosen is not None:
        if chosen < 0:
            raise ConfigError(f"model.router_aux_loss_coef is {chosen}, must be 0 or more")
        return chosen
    if config.output_router_logits:
        return float(config.router_aux_loss_coef)
    raise ConfigError(
        f"{_causal_class(config)} has experts, and its config.json does not set output_router_logits, so transformers "
        "would train it without a load-balancing loss; decide: model.router_aux_loss_coef = "
        f"{config.router_aux_loss_coef} (its config.json's) trains one, 0 trains none"
    )


def _causal_class(config: PretrainedConfig) -> str:
    named = (config.architectures or [None])[0]
    if named is not None:
        return named
    model_type = type(config)
    mapping: Any = AutoModelForCausalLM._model_mapping
    return mapping[model_type].__name__ if model_type in mapping else model_type.__name__


def rope_settings(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Rotary settings of the whole model, or of every kind of layer where they differ (Gemma 3)."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)]
    return kinds or [parameters]


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


def load_config(path: str) -> PretrainedConfig:
    """Return the model's configuration from a directory, a `config.json`, or a name on the Hub; a `ConfigError` where
    there is none, an `UnsupportedModelError` for an architecture or option that replay does not run exactly."""
    local = Path(local_path(path, "model.path"))
    file = local / "config.json" if local.is_dir() else local
    if not file.is_file():
        raise ConfigError(
            f"model.path '{path}': no config.json there; give a Hugging Face directory, its config.json, or a "
            "name on the Hub such as 'Qwen/Qwen3-0.6B'"
        )
    try:
        # Code that a directory brings along is never run.
        config = AutoConfig.from_pretrained(
            file.parent if file.name == "config.json" else file, trust_remote_code=False
        )
    except Exception as error:  # transformers has no common class
        raise ConfigError(
            f"model.path '{path}': transformers cannot read {file.name} ({' '.join(str(error).split())})"
        ) from error
    check_supported(config)
    return config


def model_spec(config: TrainConfig) -> ModelSpec:
    """Return the configured model as the cost model sees it; errors as `load_config`, and a `ConfigError` for documents
    longer than its learned positions, or adapters that fit nowhere."""
    hf = load_config(config.model.path)
    require_positions(hf, config.data.max_document_tokens)
    if config.model.lora is not None:
        require_adapters(hf)
    path = Path(config.model.path)
    name = path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    name = config.model.path if is_hub_name(config.model.path) else name
    found = model_from_hf_config(hf.to_dict(), name, BYTES_PER_ELEMENT[config.model.dtype])
    return with_adapters(config.with_run_memory(found), config.model.lora)
