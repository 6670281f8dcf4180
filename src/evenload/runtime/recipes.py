"""What replay must know about an architecture, and which models and options it runs exactly.

Replay runs the layers of transformers as they are; a recipe only says which modules a layer may hold, which
linears' outputs nobody reads, and where the architecture keeps its experts. An architecture without a recipe is
refused by name: an unknown module might mix tokens of different documents, draw random numbers, or depend on the
length of the pack, and would then be trained wrong without a sign.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, PretrainedConfig

from evenload.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class ExpertNames:
    """How an architecture's experts are called in safetensors files; transformers fuses them when it loads.

    Args:
        block: the name of the block in files, in the place of "mlp".
        gate, up, down: an expert's three matrices.
    """

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class ReplayRecipe:
    """What replay must know about an architecture.

    Args:
        unused_outputs: linears inside a layer whose output value no backward reads.
        norm_first: a norm stands between the layer's input and its first linears.
        layer_modules: classes of modules a layer may hold; anything else is refused by name.
        router: class of the module that chooses experts; None for a dense model.
        experts: class of the module that holds a layer's experts.
        expert_names: of the experts in files.
    """

    unused_outputs: tuple[str, ...]
    layer_modules: frozenset[str]
    norm_first: bool = True
    router: str | None = None
    experts: str | None = None
    expert_names: ExpertNames | None = None


# Functions of single elements, so any of them replays exactly.
_ACTIVATIONS = {"SiLUActivation", "SiLU", "GELUTanh", "GELUActivation", "NewGELUActivation"}


def _dense(prefix: str, *, post_norm: bool = False, norm_first: bool = True) -> ReplayRecipe:
    """Attention and a gated feed-forward block.

    The down projection of a pre-norm layer only feeds the residual sum, so nothing reads its value in backward. With
    a norm after it, the norm's backward does.
    """
    classes = {f"{prefix}{part}" for part in ("DecoderLayer", "Attention", "MLP", "RMSNorm")}
    unused = () if post_norm else ("mlp.down_proj",)
    return ReplayRecipe(unused, frozenset(classes | {"Linear"} | _ACTIVATIONS), norm_first)


def _experts(prefix: str, names: ExpertNames) -> ReplayRecipe:
    """Attention and a block of experts; the block's output only feeds the residual sum."""
    parts = ("DecoderLayer", "Attention", "SparseMoeBlock", "TopKRouter", "Experts", "RMSNorm")
    classes = {f"{prefix}{part}" for part in parts}
    return ReplayRecipe(
        unused_outputs=(),
        layer_modules=frozenset(classes | {"Linear"} | _ACTIVATIONS),
        router=f"{prefix}TopKRouter",
        experts=f"{prefix}Experts",
        expert_names=names,
    )


RECIPES: Mapping[str, ReplayRecipe] = {
    "GemmaForCausalLM": _dense("Gemma"),
    "Gemma2ForCausalLM": _dense("Gemma2", post_norm=True),
    "Gemma3ForCausalLM": _dense("Gemma3", post_norm=True),
    "LlamaForCausalLM": _dense("Llama"),
    "MistralForCausalLM": _dense("Mistral"),
    "MixtralForCausalLM": _experts("Mixtral", ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")),
    "Olmo2ForCausalLM": _dense("Olmo2", post_norm=True, norm_first=False),
    "Qwen2ForCausalLM": _dense("Qwen2"),
    "Qwen3ForCausalLM": _dense("Qwen3"),
    "Qwen3MoeForCausalLM": _experts("Qwen3Moe", ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")),
}
"""Architectures proven equal to transformers by tests/runtime; a new one needs a row here and a test there."""

# Rotary variants that change with the length of the batch would make a token depend on its pack.
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


def check_supported(config: PretrainedConfig) -> ReplayRecipe:
    """The recipe of the model's architecture.

    Raises:
        UnsupportedModelError: names the architecture or option.
    """
    architecture = _architecture(config)
    if architecture not in RECIPES:
        raise UnsupportedModelError(
            f"model architecture '{architecture}' is not supported; replay is proven equal to plain training for "
            f"{', '.join(sorted(RECIPES))}"
        )
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method", "?") if isinstance(quantised, Mapping) else type(quantised).__name__
        raise UnsupportedModelError(
            f"config.json has a quantization_config ({method}): quantised weights are not trained. Dequantise them "
            "once (transformers: from_pretrained, dequantize(), save_pretrained) and give that directory; for random "
            "weights remove the key"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedModelError(
            f"attention_dropout is {config.attention_dropout}: a dropout mask would differ between forward and "
            "backward packs; set it to 0 in config.json"
        )
    for rope in _rope_types(config):
        if rope not in _FIXED_ROPE:
            raise UnsupportedModelError(
                f"rope_type '{rope}' changes with the batch's length, so a token would depend on its pack; "
                f"supported: {', '.join(sorted(_FIXED_ROPE))}"
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            "use_bidirectional_attention is set: tokens would see later ones, which slices of a document do not hold; "
            "only causal decoders are trained"
        )
    if getattr(config, "router_jitter_noise", 0.0):
        raise UnsupportedModelError(
            f"router_jitter_noise is {config.router_jitter_noise}: the noise would differ between forward and backward "
            "packs; set it to 0 in config.json"
        )
    _refuse_mixed_layers(config, RECIPES[architecture])
    return RECIPES[architecture]


def position_warning(config: PretrainedConfig, max_document_tokens: int) -> str:
    """What to say where documents may be longer than what the model's positions are made for; "" where they are not.

    Args:
        max_document_tokens: the longest document that is trained.
    """
    known = getattr(config, "max_position_embeddings", None)
    if not known:
        return ""
    for rope in _ropes(config):
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
    """The limit that attention scores are squeezed below by a tanh; 0 = none.

    Gemma 3 has the key in its configuration, but transformers' model does not read it.
    """
    if config.model_type != "gemma2":
        return 0.0
    return float(getattr(config, "attn_logit_softcapping", None) or 0.0)


def experts_per_layer(config: PretrainedConfig) -> int:
    """0 for a dense model."""
    return getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)


def router_aux_loss_coef(config: PretrainedConfig, chosen: float | None) -> float:
    """The factor of the load-balancing loss; 0 for a model without experts, and where it is not to be trained.

    Args:
        chosen: `model.router_aux_loss_coef`; None = as transformers would train the model.

    Raises:
        ConfigError: nobody decided: transformers trains without the loss unless config.json asks for router logits,
            which is easily missed; or the model has no router.
    """
    if check_supported(config).router is None:
        if chosen:
            raise ConfigError(f"model.router_aux_loss_coef is {chosen}, but {_architecture(config)} has no experts")
        return 0.0
    if chosen is not None:
        if chosen < 0:
            raise ConfigError(f"model.router_aux_loss_coef is {chosen}, must be 0 or more")
        return chosen
    if config.output_router_logits:
        return float(config.router_aux_loss_coef)
    raise ConfigError(
        f"{_architecture(config)} has experts, and its config.json does not set output_router_logits, so transformers "
        "would train it without a load-balancing loss; decide: model.router_aux_loss_coef = "
        f"{config.router_aux_loss_coef} (its config.json's) trains one, 0 trains none"
    )


def _architecture(config: PretrainedConfig) -> str:
    named = (config.architectures or [None])[0]
    if named is not None:
        return named
    model_type = type(config)
    mapping: Any = AutoModelForCausalLM._model_mapping
    return mapping[model_type].__name__ if model_type in mapping else model_type.__name__


def _rope_types(config: PretrainedConfig) -> Iterator[str]:
    return (rope.get("rope_type", "default") for rope in _ropes(config))


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Rotary settings of the whole model, or of every kind of layer where they differ (Gemma 3)."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)]
    return kinds or [parameters]


def _refuse_mixed_layers(config: PretrainedConfig, recipe: ReplayRecipe) -> None:
    """Costs and memory are those of one kind of layer, so plans for a mixture would be wrong."""
    if recipe.router is None:
        return
    dense, step = getattr(config, "mlp_only_layers", None), getattr(config, "decoder_sparse_step", 1)
    if dense or step != 1:
        raise UnsupportedModelError(
            f"mlp_only_layers is {dense or []} and decoder_sparse_step is {step}: some layers have experts and others "
            "do not, which the cost model cannot describe; supported: experts in every layer"
        )
