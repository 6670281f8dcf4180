"""Refuse, by name, models and options that would be trained wrong without a sign."""

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig

from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.weight_files import dequantise_once
from evenload.types.architectures import TRAINED, Architecture

# Rotary variants that change with the length of the batch would make a token depend on its pack.
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


def check_supported(config: PretrainedConfig) -> Architecture:
    """Return the model's architecture; raise `UnsupportedModelError` for one, or an option, that is not supported."""
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
            f"config.json has a quantization_config ({method}): quantised weights are not trained; for random ones "
            f"remove the key. {dequantise_once(config.name_or_path or 'DIRECTORY', method)}"
        )
    noise = [(key, "a dropout mask") for key in architecture.dropouts] + [("router_jitter_noise", "the noise")]
    for key, what in noise:
        if value := getattr(config, key, 0.0):
            yield f"{key} is {value}: {what} would differ between forward and backward; set it to 0 in config.json"
    for rope in rope_settings(config):
        if (kind := rope.get("rope_type", "default")) not in _FIXED_ROPE:
            known = ", ".join(sorted(_FIXED_ROPE))
            yield f"rope_type '{kind}' changes with the batch's length, so with a token's pack; supported: {known}"
    if getattr(config, "add_cross_attention", None):
        yield "add_cross_attention is set, and no document has an encoder's output; set it to false in config.json"
    if getattr(config, "use_bidirectional_attention", None):
        yield "use_bidirectional_attention is set: tokens would see later ones; only causal decoders are trained"
    dense, step = getattr(config, "mlp_only_layers", None), getattr(config, "decoder_sparse_step", 1)
    if architecture.experts is not None and (dense or step != 1):
        yield (
            f"mlp_only_layers is {dense or []} and decoder_sparse_step is {step}: some layers have experts and others "
            "do not; supported: experts in every layer"
        )


def require_adapters(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError` for an architecture whose linears get no adapters."""
    if why := check_supported(config).unadapted:
        name = _causal_class(config)
        raise UnsupportedModelError(f"model.lora is set and {name} {why}; remove [model.lora] to train all weights")


def require_positions(config: PretrainedConfig, max_document_tokens: int) -> None:
    """Raise `ConfigError` where documents may be longer than a model's table of learned positions."""
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
    """Return a warning where documents may be longer than the model's rotary positions reach; "" = they are not."""
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
        "position. To keep within what the model knows, lower data.max_document_tokens with data.overlong = "
        '"split"; to lengthen its context, set max_position_embeddings (and rope scaling) in config.json'
    )


def attention_soft_cap(config: PretrainedConfig) -> float:
    key = check_supported(config).soft_cap_key
    return float((getattr(config, key, None) if key else None) or 0.0)


def router_aux_loss_coef(config: PretrainedConfig, chosen: float | None) -> float:
    """Return the factor of the load-balancing loss, 0 = not trained, of which `chosen` is `model.router_aux_loss_coef`.
    `ConfigError`: the model has no router, or neither `chosen` nor `output_router_logits` of config.json decides."""
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
    """Return the rotary settings of the model, or of every kind of layer where they differ (Gemma 3)."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)]
    return kinds or [parameters]
