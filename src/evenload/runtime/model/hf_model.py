"""Cut unmodified Hugging Face decoders into the units that a pipeline stage owns.

A *unit* is the embedding, one layer, or the head (final norm and output projection). The model is built without memory,
cut to the stage's units, and only those are filled: from safetensors, or from a seed that depends on the unit and not
on the layout.
"""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from evenload.config.sections import LoraConfig
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.liger import use_liger
from evenload.runtime.model.lora import add_adapters
from evenload.runtime.model.supported import check_supported, require_adapters
from evenload.runtime.model.tensor_weights import require_tensor_parallel, split_weights
from evenload.runtime.model.weight_conversion import keep_precise_buffers
from evenload.runtime.model.weight_files import (
    EMBEDDING,
    HEAD,
    LAYERS,
    NORM,
    POSITIONS,
    fill_constants,
    fitting_weights,
    initialise_weights,
)
from evenload.types.architectures import Architecture
from evenload.types.layout import ParallelLayout


@dataclass(eq=False)
class StageModel:
    """Holds the part of a decoder that one stage runs.

    Args:
        layers: by global layer index.
        rotary: makes rotary positions; None = the model learns a table, `positions`, which the first stage has.
        embedding: on the first stage (and on the last when tied), else None.
        norm, head: on the last stage, else None.
        router_aux_loss_coef: factor of the load-balancing loss; 0 = not trained.
        liger: what Liger's kernels compute; () = all is plain torch.
    """

    config: PretrainedConfig
    architecture: Architecture
    layers: dict[int, nn.Module]
    rotary: nn.Module | None
    embedding: nn.Embedding | None
    positions: nn.Embedding | None
    norm: nn.Module | None
    head: nn.Linear | None
    is_first: bool
    is_last: bool
    router_aux_loss_coef: float = 0.0
    liger: tuple[str, ...] = ()

    def use_liger(self, dtype: torch.dtype, tp: int) -> None:
        """Let Liger's kernels run modules in place, and the loss where the vocabulary is not divided over `tp`."""
        rotary: dict[int, tuple[Tensor, Tensor]] = {}
        if self.rotary is not None:
            positions = torch.arange(3, device=next(self.rotary.buffers()).device)[None]
            rotary = self.position_embeddings(torch.empty((), dtype=dtype, device=positions.device), positions)
        self.liger = use_liger(self.layers, self.norm, rotary) + (("cross-entropy",) if tp == 1 else ())

    @property
    def final_modules(self) -> tuple[nn.Module, nn.Linear]:
        assert self.norm is not None
        assert self.head is not None
        return self.norm, self.head

    @property
    def modules(self) -> list[nn.Module]:
        units = (self.embedding, self.positions, *self.layers.values(), self.norm, self.head)
        return [module for module in units if module is not None]

    def named_units(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """Yield (Hugging Face parameter name, parameter) pairs of every unit, in model order."""
        names = self.architecture.names
        if self.is_first:
            yield _named(names.embedding_path, self.embedding) + _named(names.positions_path, self.positions)
        for index, layer in self.layers.items():
            yield _named(names.layer_path(index), layer)
        if self.is_last:
            # Embedding and head may be one parameter on this stage.
            is_tied = self.is_first and bool(self.config.tie_word_embeddings)
            yield _named(names.norm_path, self.norm) + ([] if is_tied else _named("lm_head", self.head))

    def unit_parameters(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """Yield the *trained* pairs of `named_units`."""
        for named in self.named_units():
            yield [(name, parameter) for name, parameter in named if parameter.requires_grad]

    def constants(self) -> dict[str, Tensor]:
        """Return what its units store and do not train, such as biases that choose experts, by name."""
        return {
            name: tensor
            for _, path, unit in numbered_units(self)
            for name, tensor in unit.state_dict(prefix=f"{path}.", keep_vars=True).items()
            if not tensor.requires_grad
        }

    @property
    def units(self) -> tuple[int, ...]:
        """Return the numbers of its units in the order of `unit_parameters`: 0 = embedding, then layers, head."""
        first = (0,) if self.is_first else ()
        last = (1 + self.config.num_hidden_layers,) if self.is_last else ()
        return (*first, *(1 + index for index in self.layers), *last)

    def position_embeddings(self, like: Tensor, positions: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Return rotary cosines and sines by layer index, for positions int64[1, T]; `like` [1, T, hidden] has the
        compute precision and device. Empty where positions are learned."""
        if self.rotary is None:
            return {}
        kinds: tuple[str, ...] | None = getattr(self.rotary, "layer_types", None)
        if kinds is None:
            same = self.rotary(like, positions)
            return {index: same for index in self.layers}  # noqa: C420 (fromkeys loses the type)
        by_kind = {kind: self.rotary(like, positions, kind) for kind in kinds}
        return {index: by_kind[self.config.layer_types[index]] for index in self.layers}

    @property
    def logit_cap(self) -> float | None:
        return getattr(self.config, "final_logit_softcapping", None)

    def cap_logits(self, logits: Tensor) -> Tensor:
        cap = self.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def embedding_factor(self) -> Tensor | None:
        factor: Tensor | None = getattr(self.embedding, "embed_scale", None)
        return None if factor is None or self.embedding is None else factor.to(self.embedding.weight.dtype)

    def attention_heads(self, layer: int) -> tuple[int, int, int]:
        names = self.architecture.names
        attention: Any = getattr(self.layers[layer], names.attention)
        dim: int = attention.head_dim
        if names.fused:
            heads = getattr(attention, names.fused).nf // (3 * dim)
            return heads, heads, dim
        return attention.q_proj.out_features // dim, attention.k_proj.out_features // dim, dim

    def frozen_parameters(self) -> Iterator[nn.Parameter]:
        for module in self.modules:
            yield from (parameter for parameter in module.parameters() if not parameter.requires_grad)


def _named(prefix: str, module: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    return [] if module is None else list(module.named_parameters(prefix=prefix))


def empty_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make the whole model without memory; `ConfigError` where transformers cannot make it of this configuration."""
    pad, vocab_size = getattr(config, "pad_token_id", None), config.vocab_size
    if pad is not None and not -vocab_size <= pad < vocab_size:
        raise ConfigError(f"config.json: pad_token_id is {pad}, must be below the vocab_size of {vocab_size}, or null")
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        function = getattr(config, key, None)
        if isinstance(function, str) and function not in ACT2FN:
            near = difflib.get_close_matches(function, ACT2FN, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "most decoders have 'silu'"
            raise ConfigError(f"config.json: {key} is '{function}', which transformers does not know; {hint}")
    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # transformers has no common class
        raise ConfigError(
            f"config.json: transformers cannot make a {type(config).__name__.removesuffix('Config')} of it "
            f"({type(error).__name__}: {' '.join(str(error).split())}); compare it with the published one"
        ) from error
    keep_precise_buffers(whole, dtype)
    return whole


def require_model(config: PretrainedConfig, weights: str | None) -> None:
    """Refuse a configuration that makes no model, and weights that are not exactly the model's (`weight_files`)."""
    whole = empty_model(config)
    if weights is not None:
        fitting_weights(whole, Path(weights))


def build_stage_model(
    config: PretrainedConfig,
    *,
    layers: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    weights: str | None,
    seed: int,
    lora: LoraConfig | None = None,
    router_aux_loss_coef: float = 0.0,
    tp_rank: int = 0,
    tp: int = 1,
) -> StageModel:
    """Make one stage's part of the model and fill its weights.

    Args:
        layers: half-open range of layer indices.
        weights: directory with safetensors, or None to initialise from `seed`.
        tp_rank, tp: which part of every matrix to keep (`tensor_weights`).

    Raises:
        UnsupportedModelError: a layer holds a module that replay does not know, or that tp or adapters cannot take.
        ConfigError: the weights are not exactly the model's, adapters fit nowhere, or sizes do not divide by tp.
    """
    architecture = check_supported(config)
    require_tensor_parallel(config, tp)
    if lora is not None:
        require_adapters(config)
    whole = empty_model(config, dtype)
    stored = None if weights is None else fitting_weights(whole, Path(weights))
    names = architecture.names
    decoder: Any = getattr(whole, names.decoder)
    is_first, is_last = layers[0] == 0, layers[1] == config.num_hidden_layers
    kept = {index: getattr(decoder, names.layers)[index] for index in range(*layers)}
    _refuse_unknown_modules(kept, architecture)
    tied_copy = is_last and bool(config.tie_word_embeddings)
    stage = StageModel(
        config=config,
        architecture=architecture,
        layers=kept,
        # Real memory, and fp32 whatever the model's precision: its frequencies are computed, not loaded.
        rotary=None if names.positions else type(decoder.rotary_emb)(config).to(device),
        embedding=getattr(decoder, names.embedding) if is_first or tied_copy else None,
        positions=getattr(decoder, names.positions) if is_first and names.positions else None,
        norm=getattr(decoder, names.norm) if is_last else None,
        head=whole.lm_head if is_last else None,
        is_first=is_first,
        is_last=is_last,
        router_aux_loss_coef=router_aux_loss_coef,
    )
    units = list(numbered_units(stage))
    for number, name, unit in units:
        if number == HEAD and tied_copy:
            assert stage.embedding is not None
            unit.weight = stage.embedding.weight
            continue
        # Units are filled one by one, so that only one is whole under tp. Random weights are made on the CPU, so that
        # every device starts from the same ones.
        unit.to_empty(device="cpu" if stored is None else device)
        if stored is None:
            initialise_weights(whole, number, unit, seed)
            unit.to(device)
        else:
            stored.load(unit.state_dict(prefix=f"{name}."))
        fill_constants(whole, unit)
        if tp > 1 and lora is None:
            split_weights([(name, unit)], architecture, tp_rank, tp)
    if lora is not None:
        add_adapters(whole, kept, lora, seed)
        if tp > 1:
            # Adapters take their sizes and random values from whole linears.
            split_weights([(name, unit) for _, name, unit in units], architecture, tp_rank, tp)
    return stage


def numbered_units(stage: StageModel) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield the modules that are filled one by one: the number of a seed, a name in the whole model, the module."""
    names = stage.architecture.names
    for index, layer in stage.layers.items():
        yield LAYERS + index, names.layer_path(index), layer
    for number, name, unit in (
        (EMBEDDING, names.embedding_path, stage.embedding),
        (POSITIONS, names.positions_path, stage.positions),
        (NORM, names.norm_path, stage.norm),
        (HEAD, "lm_head", stage.head),
    ):
        if unit is not None:
            yield number, name, unit


def build_rank_models(
    config: PretrainedConfig, layout: ParallelLayout, pp_rank: int, build: Callable[..., StageModel]
) -> dict[int, StageModel]:
    """Make the models of a pipeline rank's virtual stages, ascending, by `build(layers=, tp=)`. Tied embeddings on one
    rank are one parameter."""
    models = {
        stage: build(config, layers=layers, tp=layout.tp)
        for stage, layers in enumerate(layout.stage_layers)
        if pp_rank in layout.ranks_of_stage(stage)
    }
    if config.tie_word_embeddings and len(models) > 1 and {0, layout.num_stages - 1} <= models.keys():
        first, last = models[0], models[layout.num_stages - 1]
        assert first.embedding is not None
        assert last.head is not None
        last.head.weight, last.embedding = first.embedding.weight, None
    return models


def _refuse_unknown_modules(layers: dict[int, nn.Module], architecture: Architecture) -> None:
    for index, layer in layers.items():
        for name, module in layer.named_modules():
            if type(module).__name__ not in architecture.layer_classes:
                raise UnsupportedModelError(
                    f"{architecture.names.layer_path(index)}.{name or '(layer)'} is a {type(module).__name__}, which "
                    f"replay does not know; known: {', '.join(sorted(architecture.layer_classes))}"
                )
