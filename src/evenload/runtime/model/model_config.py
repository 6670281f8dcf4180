"""Read the `config.json` of the configured model, or take that of a built-in one, for transformers and the cost model.
Options that would be trained wrong without a sign are refused by name.

What planning needs of any decoder is read from the model itself (`described`): it is made on the meta device, without
memory, and its own forward runs on a few tokens, as in `runtime.model.structure`, whose survey says what backward
reads. Of every layer the products, attention, experts and weights are noted; layers alike in all of that are of one
kind.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from evenload.config.sections import with_adapters
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig
from evenload.data.hub import is_hub_name, local_path, model_from_config
from evenload.errors import ConfigError, UnsupportedModelError, did_you_mean
from evenload.runtime.model.structure import LayerNotes, Survey, block_of
from evenload.runtime.model.weight_files import dequantise_once
from evenload.types.layer_kind import ExpertsKind, LayerKind
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
    """Return the configuration as `read_config`, of a model of text and pictures its text part's; an
    `UnsupportedModelError` for an architecture or option that replay does not run exactly."""
    config = read_config(path)
    require_trainable(config)
    return text_part(config)


def read_config(path: str) -> PretrainedConfig:
    """Read a configuration from a directory, a `config.json`, or a name on the Hub, or take a built-in one; a
    `ConfigError` where there is none."""
    if path in CONFIGURATIONS:
        return AutoConfig.for_model(**CONFIGURATIONS[path])
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
        return AutoConfig.from_pretrained(named, trust_remote_code=False)
    except Exception as error:  # transformers has no common class
        why = " ".join(str(error).split())
        raise ConfigError(f"model.path '{path}': transformers cannot read {file.name} ({why})") from error


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
    "bamba", "cohere2", "deepseek_v3", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "gpt2",
    "gpt_oss", "granite", "granite_swa", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "llama", "llama4_text",
    "longcat_flash", "mamba2", "mimo_v2_flash", "minimax_m2", "ministral3", "mistral", "mixtral", "nemotron_h", "olmo2",
    "olmo3", "olmo_hybrid", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "smollm3",
}  # fmt: skip
"""Model types whose gradients our tests compare with transformers' own (test_replay, test_attention_call,
test_tensor_families, test_recurrent, test_recurrent_training)."""


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


def require_one_precision(config: PretrainedConfig, dtype: str, pp: int) -> None:
    """Raise `ConfigError` where stages would send each other hidden states of another precision than the model's."""
    if pp > 1 and dtype == "bfloat16" and getattr(config, "residual_in_fp32", False):
        raise ConfigError(
            f"parallel.pp is {pp}, and layers of {_name_of(config)} hand on hidden states in float32 (residual_in_fp32 "
            "in config.json), which bfloat16 stages do not send; set residual_in_fp32 to false there, parallel.pp = 1 "
            'with parallel.dp, or model.dtype = "float32"'
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


def described(tree: Mapping[str, Any], name: str) -> ModelSpec:
    """Return a model from its parsed `config.json`, of a model of text and pictures its text part; `ConfigError` where
    transformers does not build a decoder from it that runs layer by layer."""
    try:
        config = AutoConfig.for_model(**tree)
    except Exception as error:  # transformers has no common class
        why = " ".join(str(error).split())
        raise ConfigError(f"model {name}: transformers makes no configuration of config.json ({why})") from error
    return describe(config, name)


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a decoder: of a model of text and pictures its text part's."""
    text = config.get_text_config(decoder=True)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    tied = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return type(text).from_dict(text.to_dict() | {"tie_word_embeddings": tied})


def describe(config: PretrainedConfig, name: str) -> ModelSpec:
    """Return a model from transformers' configuration, as `described`."""
    text = text_part(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16)
        survey = Survey(model.train())
        survey.run()
        return _spec(model, survey, name)
    except Exception as error:  # of transformers, and of the model's own code on tensors without values
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"model {name}: what layers of model_type '{text.model_type}' compute cannot be told from transformers' "
            f"model ({why}); compare config.json with the published one, or plan a built-in model that comes closest"
        ) from error


def _spec(model: Any, survey: Survey, name: str) -> ModelSpec:
    of_layers = [_kind(index, notes, survey.whole.layers[index]) for index, notes in enumerate(survey.notes)]
    kinds = tuple(dict.fromkeys(of_layers))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    is_tied, of_embedding = head is embedding, head.numel()
    modules = [model.get_submodule(path) for path in survey.prologue]
    before = {id(one): one.numel() for module in modules for one in module.parameters(recurse=False)}
    positions = sum(before.values()) - of_embedding
    rows = [one.num_embeddings for one in modules if isinstance(one, nn.Embedding) and one.weight is not embedding]
    longest = getattr(model.config, "max_position_embeddings", 0)
    others = sum(one.numel() for one in model.parameters()) - sum(kind.parameters for kind in of_layers)
    return ModelSpec(
        name=name,
        hidden_size=survey.hidden_size,
        vocab_size=of_embedding // survey.hidden_size,
        kinds=kinds,
        layers=tuple(kinds.index(kind) for kind in of_layers),
        norm_parameters=others - (1 if is_tied else 2) * of_embedding - positions,
        tied_embeddings=is_tied,
        position_parameters=positions,
        tensor_refusal=survey.tensor_cut("").refusal,
        position_rows=longest if any(longest <= one <= longest + 2 for one in rows) else 0,
    )


def _kind(index: int, notes: LayerNotes, layer: nn.Module) -> LayerKind:
    sites = notes.sites()
    kept = sites.linears - sites.unused
    products = tuple(
        replace(
            one,
            is_read=owner in kept and not notes.is_mixed(owner),
            in_mixer=notes.is_mixed(owner) or owner not in sites.linears,
        )
        for owner, _, one in notes.products
    )
    experts = _experts(notes, is_read=not sites.experts <= sites.unused)
    parameters = sum(one.numel() for one in layer.parameters())
    matrices = sum({owner: one.parameters for owner, _, one in notes.products}.values())
    divided = matrices + notes.divided_biases + (experts.count * experts.parameters if experts else 0)
    multiplied = {f"{owner}.{part}" for owner, _, _ in notes.products for part in ("weight", "bias")}
    for path, cut in notes.packed.items():
        beside = layer.get_submodule(path).named_parameters()
        divided += sum(w.numel() for name, w in beside if cut.has_part_of(name) and f"{path}.{name}" not in multiplied)
    if 2 * divided < parameters:
        raise ValueError(f"most weights of layer {index} take part in no product of every token")
    # A linear alone in its module, such as the gate of a shared expert, is no block.
    of_blocks = Counter(block_of(owner) for owner, _, _ in notes.products)
    attention = None
    if notes.attention:
        # Two calls of attention in a layer (LongCat) are one of as many heads.
        (_, first), count = notes.attention[0], len(notes.attention)
        is_kept = not notes.is_mixed(notes.attention[-1][0])
        attention = replace(first, heads=count * first.heads, kv_heads=count * first.kv_heads, is_kept=is_kept)
    return LayerKind(
        products=products,
        parameters=parameters,
        copied_parameters=parameters - divided,
        attention=attention,
        experts=experts,
        states=tuple(notes.states),
        mixer=notes.mixer,
        blocks=sum(count > 1 for count in of_blocks.values()),
        biases=notes.has_row_biases,
    )


def _experts(notes: LayerNotes, *, is_read: bool) -> ExpertsKind | None:
    if notes.experts:
        experts = [*notes.experts.values()][-1]
    elif notes.stacked:
        (count, width, outputs), inner = notes.stacked[0].shape, notes.stacked[-1].shape[1]
        gated = outputs == 2 * inner
        experts = ExpertsKind(count=count, chosen=notes.chosen, width=width, inner=inner, gated=gated)
    else:
        return None
    choices = sum(count for path, count in notes.choices if not notes.is_mixed(path))
    return replace(experts, is_read=is_read, router=notes.router, cast_router=notes.cast_router, choices=choices)
