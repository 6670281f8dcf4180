"""Unmodified Hugging Face decoders, cut into the units a pipeline stage owns.

A *unit* is the embedding, one layer, or the head (final norm and output projection): the granularity of
stages, optimizer shards, checkpoints and live moves. The model is built without memory, cut to the
stage's units, and only those are filled: from safetensors, or from a seed that depends on the unit and
not on the layout, so that every layout starts from the same weights.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from evenload.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True)
class ReplayRecipe:
    """What replay must know about an architecture.

    Args:
        unused_outputs: linears inside a layer whose output value no backward reads.
        layer_modules: classes of modules a layer may hold; anything else is refused by name.
    """

    unused_outputs: tuple[str, ...]
    layer_modules: frozenset[str]


def _llama_like(prefix: str) -> ReplayRecipe:
    classes = {f"{prefix}{part}" for part in ("DecoderLayer", "Attention", "MLP", "RMSNorm")}
    return ReplayRecipe(("mlp.down_proj",), frozenset(classes | {"Linear", "SiLUActivation", "SiLU"}))


RECIPES = {
    "LlamaForCausalLM": _llama_like("Llama"),
    "MistralForCausalLM": _llama_like("Mistral"),
    "Qwen2ForCausalLM": _llama_like("Qwen2"),
    "Qwen3ForCausalLM": _llama_like("Qwen3"),
}
"""Architectures proven equal to transformers by tests/runtime; a new one needs a row here and a test there."""

# Rotary variants that change with the length of the batch would make a token depend on its pack.
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


@dataclass(eq=False)
class StageModel:
    """The part of a decoder that one stage runs.

    Args:
        layers: by global layer index.
        embedding: on the first stage (and on the last when tied), else None.
        norm, head: on the last stage, else None.
        units: name -> modules, in model order.
    """

    config: PretrainedConfig
    recipe: ReplayRecipe
    layers: dict[int, nn.Module]
    rotary: nn.Module
    embedding: nn.Embedding | None
    norm: nn.Module | None
    head: nn.Linear | None
    is_first: bool
    is_last: bool

    def unit_parameters(self) -> Iterator[tuple[str, list[tuple[str, nn.Parameter]]]]:
        """Unit name and its (Hugging Face parameter name, parameter) pairs, in model order."""
        if self.is_first:
            assert self.embedding is not None
            yield "embedding", [("model.embed_tokens.weight", _parameter(self.embedding))]
        for index, layer in self.layers.items():
            yield f"layer.{index}", [(f"model.layers.{index}.{n}", p) for n, p in layer.named_parameters()]
        if self.is_last:
            assert self.norm is not None
            assert self.head is not None
            named = [(f"model.norm.{n}", p) for n, p in self.norm.named_parameters()]
            if not self.ties_within_stage:
                named.append(("lm_head.weight", _parameter(self.head)))
            yield "head", named

    @property
    def ties_within_stage(self) -> bool:
        """Embedding and head are one parameter on this stage."""
        return self.is_first and self.is_last and bool(self.config.tie_word_embeddings)


def _parameter(module: nn.Embedding | nn.Linear) -> nn.Parameter:
    assert isinstance(module.weight, nn.Parameter)
    return module.weight


def load_config(path: str) -> PretrainedConfig:
    """The model's configuration from a directory or a `config.json`.

    Raises:
        ConfigError: no such file.
        UnsupportedModelError: an architecture or option that replay does not run exactly.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ConfigError(
            f"model.path '{path}': no config.json there; give a Hugging Face directory or its config.json"
        )
    config = AutoConfig.from_pretrained(file.parent if file.name == "config.json" else file)
    check_supported(config)
    return config


def check_supported(config: PretrainedConfig) -> ReplayRecipe:
    """The recipe of the model's architecture.

    Raises:
        UnsupportedModelError: names the architecture or option.
    """
    model_type = type(config)
    architecture = (config.architectures or [None])[0]
    if architecture is None:
        mapping: Any = AutoModelForCausalLM._model_mapping
        architecture = mapping[model_type].__name__ if model_type in mapping else model_type.__name__
    if architecture not in RECIPES:
        raise UnsupportedModelError(
            f"model architecture '{architecture}' is not supported; replay is proven equal to plain training for "
            f"{', '.join(sorted(RECIPES))}"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedModelError(
            f"attention_dropout is {config.attention_dropout}: a dropout mask would differ between forward and "
            "backward packs; set it to 0 in config.json"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _FIXED_ROPE:
        raise UnsupportedModelError(
            f"rope_type '{rope}' changes with the batch's length, so a token would depend on its pack; "
            f"supported: {', '.join(sorted(_FIXED_ROPE))}"
        )
    return RECIPES[architecture]


def build_stage_model(
    config: PretrainedConfig,
    *,
    layers: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    weights: str | None,
    seed: int,
) -> StageModel:
    """Make one stage's part of the model and fill its weights.

    Args:
        layers: half-open range of layer indices.
        weights: directory with safetensors, or None to initialise from `seed`.

    Raises:
        UnsupportedModelError: a layer holds a module that replay does not know.
        ConfigError: the weights lack a needed tensor.
    """
    recipe = check_supported(config)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    decoder: Any = whole.model
    is_first, is_last = layers[0] == 0, layers[1] == config.num_hidden_layers
    kept = {index: decoder.layers[index] for index in range(*layers)}
    for index, layer in kept.items():
        for name, module in layer.named_modules():
            if type(module).__name__ not in recipe.layer_modules:
                raise UnsupportedModelError(
                    f"model.layers.{index}.{name or '(layer)'} is a {type(module).__name__}, which replay does not "
                    f"know; known: {', '.join(sorted(recipe.layer_modules))}"
                )
    tied_copy = is_last and bool(config.tie_word_embeddings)
    stage = StageModel(
        config=config,
        recipe=recipe,
        layers=kept,
        # Real memory, and fp32 whatever the model's precision: its frequencies are computed, not loaded.
        rotary=type(decoder.rotary_emb)(config).to(device),
        embedding=decoder.embed_tokens if is_first or tied_copy else None,
        norm=decoder.norm if is_last else None,
        head=whole.lm_head if is_last else None,
        is_first=is_first,
        is_last=is_last,
    )
    modules: dict[str, nn.Module | None] = {f"model.layers.{index}": layer for index, layer in kept.items()}
    modules |= {"model.embed_tokens": stage.embedding, "model.norm": stage.norm, "lm_head": stage.head}
    for module in modules.values():
        if module is not None:
            module.to_empty(device=device)
    if tied_copy and stage.head is not None and stage.embedding is not None:
        stage.head.weight = stage.embedding.weight
    if weights is None:
        _initialise(whole, modules, seed)
    else:
        _load(modules, Path(weights), tied=tied_copy)
    config._attn_implementation = "sdpa"
    return stage


def _initialise(whole: Any, modules: dict[str, nn.Module | None], seed: int) -> None:
    """Fill every unit by the model's own rules, from a seed of its own."""
    order = {"model.embed_tokens": 0, "model.norm": 1, "lm_head": 2}
    tied = bool(whole.config.tie_word_embeddings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in modules.items():
            if module is None or (name == "lm_head" and tied):
                continue
            index = order[name] if name in order else 3 + int(name.rsplit(".", 1)[1])
            torch.manual_seed(seed * 1_000_003 + index)
            for part in module.modules():
                whole._init_weights(part)


def _load(modules: dict[str, nn.Module | None], directory: Path, *, tied: bool) -> None:
    """Copy tensors from a Hugging Face safetensors directory into the modules."""
    where = _tensor_files(directory)
    by_file: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for prefix, module in modules.items():
        if module is None or (prefix == "lm_head" and tied):
            continue
        for name, parameter in module.named_parameters(prefix=prefix):
            if name not in where:
                raise ConfigError(f"{directory}: no tensor '{name}'; is this the directory of the configured model?")
            by_file.setdefault(where[name], []).append((name, parameter))
    with torch.no_grad():
        for file, wanted in by_file.items():
            with safe_open(directory / file, framework="pt") as tensors:
                for name, parameter in wanted:
                    tensor = tensors.get_tensor(name)
                    if tensor.shape != parameter.shape:
                        raise ConfigError(
                            f"{directory / file}: '{name}' has shape {tuple(tensor.shape)}, the model needs "
                            f"{tuple(parameter.shape)}"
                        )
                    parameter.copy_(tensor)


def _tensor_files(directory: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"{directory}: neither model.safetensors nor model.safetensors.index.json; "
            "set model.random_init = true to train from scratch"
        )
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single.name)
