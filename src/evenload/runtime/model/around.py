"""Run transformers' own code around the layers of a decoder: `WholeModel`.

The layers of the whole model, and the modules with weights before the first of them, are replaced by slots. A pass runs
the model's forward; what a layer's slot returns decides its caller. So factors of embeddings, tables of positions,
rotary embeddings by kind of layer, multipliers, the last norm, and scales and caps of logits are the model's own code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from evenload.errors import UnsupportedModelError
from evenload.runtime.model.state_calls import install

ATTENTION_NAME = "evenload_range"
"""Of our functions for masks, attention and experts among those of transformers."""


class LayerCall(NamedTuple):
    """Holds the arguments that the model gives a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def hidden(self) -> Tensor:
        """Hidden states [1, T, hidden]."""
        return self.args[0] if self.args else self.kwargs["hidden_states"]

    def on(self, hidden: Tensor) -> "LayerCall":
        if self.args:
            return LayerCall((hidden, *self.args[1:]), self.kwargs)
        return LayerCall((), self.kwargs | {"hidden_states": hidden})

    def run(self, layer: nn.Module) -> Tensor:
        output = layer(*self.args, **self.kwargs)
        return output if isinstance(output, Tensor) else output[0]


OnLayer = Callable[[int, LayerCall], Tensor]
"""Runs in the place of a layer: its index and call to hidden states [1, T, hidden]."""


class LayersRan(Exception):
    """Ends a pass behind the layer that was wanted last."""


class _LayerSlot(nn.Module):
    """Stands in the model for a layer, whose attributes it shows."""

    def __init__(self, index: int, layer: nn.Module, whole: "WholeModel") -> None:
        super().__init__()
        self.__dict__["at"] = (index, layer, whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["at"][1], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        index, _, whole = self.__dict__["at"]
        output = whole.on_layer(index, LayerCall(args, kwargs))
        return (output, None) if whole.returns_tuple else output


class _Slot(nn.Module):
    """Stands in the model for a module of the prologue, which other stages than the first do not have: it gives them
    something of the right shape, which nobody reads."""

    def __init__(self, module: nn.Module, whole: "WholeModel") -> None:
        super().__init__()
        self.own = module  # a model may ask for the type of its first parameter
        self.__dict__["whole"] = whole

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "own" else getattr(self.own, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module, whole = self.own, self.__dict__["whole"]
        if whole.has_prologue:
            return module(*args, **kwargs)
        given: Tensor = args[0] if args else next(one for one in kwargs.values() if isinstance(one, Tensor))
        if isinstance(module, nn.Embedding):
            # Of positions, some are given what they are added to.
            rows = given.shape[:-1] if given.is_floating_point() else given.shape
            return whole.like.new_zeros(*rows, module.embedding_dim)
        return given.new_zeros(*given.shape[:-1], module.out_features) if isinstance(module, nn.Linear) else given


class WholeModel:
    """A decoder of transformers whose layers are slots.

    Args:
        layers: the path of the list of layers; prologue: paths of modules that are not on every stage.
        returns_tuple: layers return hidden states in a tuple.
    """

    def __init__(
        self, model: PreTrainedModel, layers: str, prologue: Sequence[str] = (), *, returns_tuple: bool = False
    ) -> None:
        self.model, self.path, self.returns_tuple = model, layers, returns_tuple
        self.has_prologue, self.like = True, torch.empty(0)
        self.on_layer: OnLayer = lambda index, call: call.hidden
        own: Any = model.get_submodule(layers)
        self.layers: dict[int, nn.Module] = dict(enumerate(own))
        self.modules = {path: model.get_submodule(path) for path in prologue}
        self.configs = configs_of(model)
        install(model)
        for index, layer in self.layers.items():
            own[index] = _LayerSlot(index, layer, self)
        for path, module in self.modules.items():
            model.set_submodule(path, _Slot(module, self))

    def restore(self) -> None:
        """Put layers and modules back into the model."""
        for path, module in [*self.modules.items(), *((f"{self.path}.{at}", one) for at, one in self.layers.items())]:
            self.model.set_submodule(path, module)

    def run(
        self, positions: Tensor | None, on_layer: OnLayer, *, token_ids: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """Run the model's forward; return its logits [T, vocabulary], or None where `on_layer` raised `LayersRan`.

        Args:
            positions: int64[T], from 0 in every document; None = the model counts them itself.
            token_ids: int64[T]; None = hidden states are known, and the prologue is another stage's.
            like: [n, hidden], as the hidden states, of the compute precision and device.
        """
        self.has_prologue, self.like, self.on_layer = token_ids is not None, like, on_layer
        # Without the prologue token ids name rows alone.
        ids = torch.zeros(len(like), dtype=torch.int64, device=like.device) if token_ids is None else token_ids
        given: dict[str, Any] = {} if positions is None else {"position_ids": positions[None]}
        if hasattr(self.model.config, "output_router_logits"):
            given["output_router_logits"] = False  # the load-balancing loss is ours (`RouterBalance`)
        # A mask of ones: without one, transformers looks for documents in the positions. Of as many rows as the layers
        # get, where a tensor-parallel rank has some of the pack's.
        ones = ids.new_ones(1, len(like))
        try:
            output = self.model(ids[None], attention_mask=ones, use_cache=False, **given)
        except LayersRan:
            return None
        finally:
            self.on_layer = lambda index, call: call.hidden
        return output.logits.squeeze(0)  # `[0]` would copy their gradient


@contextmanager
def using(configs: Sequence[PretrainedConfig], name: str) -> Iterator[None]:
    """Let a model's attention and experts run the functions that are registered under a name. Configurations are shared
    with the caller's objects, so they are changed only while a pass runs."""
    fields = ("_attn_implementation_internal", "_experts_implementation_internal")
    before = [(config, field, getattr(config, field, None)) for config in configs for field in fields]
    for config, field, _ in before:
        setattr(config, field, name)
    try:
        yield
    finally:
        for config, field, value in before:
            setattr(config, field, value)


def configs_of(model: nn.Module) -> list[PretrainedConfig]:
    """Return the configurations that modules of a model hold, each once."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(one): one for one in found if isinstance(one, PretrainedConfig)}.values())


def find_layers(model: PreTrainedModel) -> str:
    """Return the path of the list of layers: of lists of modules that are in no other one that with as many as the
    configuration says, else the longest."""
    num_layers = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)
    lists = {name: len(one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one)}
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outer:
        raise UnsupportedModelError(f"{type(model).__name__} has no list of layers")
    return max(outer, key=lambda name: (lists[name] == num_layers, lists[name]))
