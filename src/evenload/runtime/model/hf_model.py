"""Cut unmodified Hugging Face decoders into the units that a pipeline stage owns.

A *unit* is the embedding, one layer, or the head (final norm and output projection). The model is built without memory,
cut to the stage's units, and only those are filled: from safetensors, or from a seed that depends on the unit and not
on the layout.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from evenload.config.sections import LoraConfig
from evenload.errors import ConfigError, UnsupportedModelError, did_you_mean
from evenload.runtime.model.around import ATTENTION_NAME, LayerCall, LayersRan, WholeModel, using
from evenload.runtime.model.liger import use_liger
from evenload.runtime.model.lora import add_adapters
from evenload.runtime.model.probe import Findings, probe
from evenload.runtime.model.structure import Structure, structure_of
from evenload.runtime.model.tensor_weights import require_tensor_parallel, split_weights
from evenload.runtime.model.weight_conversion import keep_precise_buffers
from evenload.runtime.model.weight_files import (
    EMBEDDING,
    HEAD,
    LAYERS,
    NORM,
    POSITIONS,
    Weights,
    empty_parameters,
    fill_buffers,
    fitting_weights,
    initialise_weights,
)
from evenload.types.layout import ParallelLayout


@dataclass(eq=False)
class StageModel:
    """Holds the part of a decoder that one stage runs.

    Args:
        whole: transformers' model, whose layers are slots.
        layers: by global layer index.
        prologue, epilogue: modules before the first and behind the last layer by path; empty on other stages.
        router_aux_loss_coef: factor of the load-balancing loss; 0 = not trained.
        liger: what Liger's kernels compute; () = all is plain torch.
    """

    config: PretrainedConfig
    structure: Structure
    whole: WholeModel
    layers: dict[int, nn.Module]
    prologue: dict[str, nn.Module]
    epilogue: dict[str, nn.Module]
    router_aux_loss_coef: float = 0.0
    liger: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        return bool(self.prologue)

    @property
    def is_last(self) -> bool:
        return bool(self.epilogue)

    @property
    def embedding(self) -> nn.Embedding:
        return self.prologue[self.structure.embedding]  # type: ignore[return-value]

    @property
    def head(self) -> nn.Linear:
        return self.whole.model.get_submodule(self.structure.head)  # type: ignore[return-value]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Return the layers that are replayed in one graph, in order."""
        return [group for group in self.structure.groups if group[0] in self.layers]

    def use_liger(self, tp: int) -> None:
        """Let Liger's kernels run modules in place, and the loss where the vocabulary is not divided over `tp`."""
        some = next(iter(next(iter(self.layers.values())).parameters()))
        calls = self.calls(torch.arange(3, device=some.device), None, some.new_zeros(3, some.shape[-1]))[1]
        rotary = {index: call.kwargs.get("position_embeddings") for index, call in calls.items()}
        last = [module for path, module in self.epilogue.items() if path != self.structure.head]
        turned = {index: pair for index, pair in rotary.items() if isinstance(pair, tuple)}
        self.liger = use_liger(self.layers, last, turned) + (("cross-entropy",) if tp == 1 else ())

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.prologue.values(), *self.layers.values(), *self.epilogue.values()]

    def named_units(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """Yield (Hugging Face parameter name, parameter) pairs of every unit, in model order. An embedding that is the
        head, too, is the first unit's alone where both are on this stage."""
        if self.is_first:
            yield _named(self.prologue)
        for index, layer in self.layers.items():
            yield _named({self.structure.layer_path(index): layer})
        if self.is_last:
            named = _named(self.epilogue)
            is_tied = self.is_first and self.structure.is_tied
            yield [pair for pair in named if not (is_tied and pair[1] is self.embedding.weight)]

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
        """Return the numbers of its units in the order of `unit_parameters`: 0 = prologue, then layers, epilogue."""
        first = (0,) if self.is_first else ()
        last = (1 + self.structure.num_layers,) if self.is_last else ()
        return (*first, *(1 + index for index in self.layers), *last)

    def calls(self, positions: Tensor, token_ids: Tensor | None, like: Tensor) -> tuple[Tensor, dict[int, LayerCall]]:
        """Run the model up to its layers; return hidden states [1, T, hidden] and the calls of own layers.

        Args:
            positions, token_ids: int64[T]; None = another stage has the prologue.
            like: [n, hidden], of the compute precision and device.
        """
        first: list[Tensor] = []
        calls: dict[int, LayerCall] = {}

        def note(index: int, call: LayerCall) -> Tensor:
            first.append(call.hidden)
            if index in self.layers:
                calls[index] = call
            if len(calls) == len(self.layers):
                raise LayersRan
            return call.hidden

        with using(self.whole.configs, ATTENTION_NAME):
            self.whole.run(positions, note, token_ids=token_ids, like=like)
        return first[0], calls

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocabulary] of final hidden states [n, hidden]; on a last stage."""
        last = self.structure.num_layers - 1
        positions = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        with using(self.whole.configs, ATTENTION_NAME):
            logits = self.whole.run(
                positions,
                lambda index, call: hidden[None] if index == last else call.hidden,
                token_ids=None,
                like=hidden.detach(),
            )
        assert logits is not None
        return logits


def _named(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [pair for path, module in modules.items() for pair in module.named_parameters(prefix=path)]


def empty_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Make the whole model without memory; `ConfigError` where transformers cannot make it of this configuration."""
    text = config.get_text_config(decoder=True)
    pad, vocab_size = getattr(text, "pad_token_id", None), text.vocab_size
    if pad is not None and not -vocab_size <= pad < vocab_size:
        raise ConfigError(f"config.json: pad_token_id is {pad}, must be below the vocab_size of {vocab_size}, or null")
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        function = getattr(text, key, None)
        if isinstance(function, str) and function not in ACT2FN:
            hint = did_you_mean(function, ACT2FN, 0.6).strip() or "most decoders have 'silu'"
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
        UnsupportedModelError: the model computes in a way that replay does not know, or that tp cannot take.
        ConfigError: the weights are not exactly the model's, adapters fit nowhere, or sizes do not divide by tp.
    """
    model = empty_model(config, dtype)
    structure = with_mixers(structure_of(model), probe(config))
    require_tensor_parallel(config, structure, tp)
    require_stage(structure, layers)
    stored = None if weights is None else fitting_weights(model, Path(weights))
    fill_buffers(model, device)
    if stored is not None:
        # Of all layers: they are small, and a switch to another layout moves parameters alone.
        buffers = {name for name, _ in model.named_buffers()}
        stored.load({name: tensor for name, tensor in model.state_dict().items() if name in buffers})
    is_first, is_last = layers[0] == 0, layers[1] == structure.num_layers
    whole = WholeModel(model, structure.layers, structure.prologue, returns_tuple=structure.returns_tuple)
    stage = StageModel(
        config=model.config,
        structure=structure,
        whole=whole,
        layers={index: whole.layers[index] for index in range(*layers)},
        prologue={path: whole.modules[path] for path in structure.prologue} if is_first else {},
        epilogue={path: model.get_submodule(path) for path in structure.epilogue} if is_last else {},
        router_aux_loss_coef=router_aux_loss_coef,
    )
    for number, name, unit in numbered_units(stage):
        if structure.is_tied and name == structure.head:
            _fill_bias(model, name, unit, stored, device)
            # Filled as the embedding, of which another stage has the same values.
            number, name, unit = EMBEDDING, structure.embedding, whole.modules[structure.embedding]
            if is_first:
                stage.head.weight = stage.embedding.weight
                continue
        # Units are filled one by one, so that only one is whole under tp. Random weights are made on the CPU, so that
        # every device starts from the same ones.
        empty_parameters(unit, "cpu" if stored is None else device)
        if stored is None:
            initialise_weights(model, number, unit, seed)
            unit.to(device)
        else:
            stored.load(unit.state_dict(prefix=f"{name}."))
        if structure.is_tied and is_last and name == structure.embedding and not is_first:
            stage.head.weight = unit.weight  # type: ignore[assignment]
        elif structure.is_tied and is_first and structure.head.startswith(f"{name}."):
            stage.head.weight = stage.embedding.weight
        if tp > 1 and lora is None:
            split_weights([(name, unit)], structure, tp_rank, tp)
    if lora is not None:
        add_adapters(model, stage.modules, structure, stage.layers, lora, seed)
        if tp > 1:
            # Adapters take their sizes and random values from whole linears.
            split_weights([(name, unit) for _, name, unit in numbered_units(stage)], structure, tp_rank, tp)
    return stage


def _fill_bias(
    model: PreTrainedModel, name: str, head: nn.Module, stored: Weights | None, device: torch.device
) -> None:
    """Fill what a head has besides the weight that is the embedding's, too."""
    others = {key: one for key, one in head.named_parameters() if key != "weight"}
    for key, one in others.items():
        values = torch.zeros_like(one, device=device)  # as every model begins
        head.register_parameter(key, nn.Parameter(values, requires_grad=one.requires_grad))
    if stored is not None and others:
        stored.load({f"{name}.{key}": head.get_parameter(key).detach() for key in others})


def with_mixers(structure: Structure, findings: Findings) -> Structure:
    """Return the structure in which nothing is recorded inside modules that mix rows in a way of their own."""
    paths = [frozenset(one.path for one in mixers) for mixers in findings.mixers]
    given = zip(structure.sites, paths, strict=True)
    sites = tuple(replace(own, mixers=of, calls=() if of else own.calls) for own, of in given)
    return replace(structure, sites=sites)


def require_layout(config: PretrainedConfig, layout: ParallelLayout) -> None:
    """Refuse layouts that a model cannot be cut for, as `build_stage_model` does."""
    structure = structure_of(empty_model(config))
    if layout.tp > 1:
        structure = with_mixers(structure, probe(config))
    require_tensor_parallel(config, structure, layout.tp)
    for layers in layout.stage_layers:
        require_stage(structure, layers)


def require_stage(structure: Structure, layers: tuple[int, int]) -> None:
    """Refuse stages that part what belongs together, with an `UnsupportedModelError`."""
    if structure.reads_tokens and layers != (0, structure.num_layers):
        raise UnsupportedModelError(
            "every layer of this model reads embeddings of its own, so all layers must be on one stage; set "
            "parallel.pp = 1 and use parallel.dp, cp or tp"
        )
    for group in structure.groups:
        if len({layers[0] <= index < layers[1] for index in group}) > 1:
            raise UnsupportedModelError(
                f"layers {group[0]} to {group[-1]} of this model share keys and values, so they must be on one stage; "
                "set parallel.stage_layers so, or a smaller parallel.pp"
            )


def numbered_units(stage: StageModel) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield the modules that are filled one by one: the number of a seed, a path in the whole model, the module."""
    structure = stage.structure
    for index, layer in stage.layers.items():
        yield LAYERS + index, structure.layer_path(index), layer
    others = [path for path in structure.prologue if path != structure.embedding]
    last = [path for path in structure.epilogue if path != structure.head]
    numbers = {structure.embedding: EMBEDDING, structure.head: HEAD}
    numbers |= {path: POSITIONS - 2 * at for at, path in enumerate(others)}
    numbers |= {path: NORM if at == 0 else POSITIONS - 2 * at - 1 for at, path in enumerate(last)}
    for path, module in (stage.prologue | stage.epilogue).items():
        yield numbers[path], path, module


def build_rank_models(layout: ParallelLayout, pp_rank: int, build: Callable[..., StageModel]) -> dict[int, StageModel]:
    """Make the models of a pipeline rank's virtual stages, ascending, by `build(layers=, tp=)`. Tied embeddings on one
    rank are one parameter."""
    models = {
        stage: build(layers=layers, tp=layout.tp)
        for stage, layers in enumerate(layout.stage_layers)
        if pp_rank in layout.ranks_of_stage(stage)
    }
    first, last = models.get(0), models.get(layout.num_stages - 1)
    if first is not None and last is not None and first.structure.is_tied:
        last.head.weight = first.embedding.weight
    return models
