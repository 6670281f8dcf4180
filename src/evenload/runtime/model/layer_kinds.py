"""Read what planning needs of any decoder of transformers from the model itself: `described`.

The model is made on the meta device, without memory, and its own forward runs on a few tokens, as in
`runtime.model.structure`, whose survey says what backward reads. Of every layer the products, attention, experts and
weights are noted; layers alike in all of that are of one kind.

What mixes tokens otherwise than by attention through transformers' interface is known by what it computes inside a
layer: a convolution, a running sum or a padded block over tokens, scores of tokens by tokens, places of tokens instead
of their positions, or attention with a mask or with tensors that are not known. Its documents must stay whole.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from evenload.errors import ConfigError
from evenload.runtime.model import structure
from evenload.runtime.model.around import LayerCall, WholeModel, find_layers, using
from evenload.runtime.model.mask_rules import mask_rule
from evenload.types.layer_kind import AttentionKind, ExpertsKind, LayerKind, Product
from evenload.types.model import ModelSpec

_NAME = "evenload_layer_kinds"
_SCORES = {"matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm"}
_KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}
"""Of attention's further arguments, those that change nothing between tokens, or are priced."""


def described(tree: Mapping[str, Any], name: str) -> ModelSpec:
    """Return a model from its parsed `config.json`, of a model of text and pictures its text part; `ConfigError` where
    transformers does not build a decoder from it that runs layer by layer."""
    try:
        config = AutoConfig.for_model(**tree)
    except Exception as error:  # transformers has no common class
        why = " ".join(str(error).split())
        raise ConfigError(f"model {name}: transformers makes no configuration of config.json ({why})") from error
    return describe(config, name)


def describe(config: PretrainedConfig, name: str) -> ModelSpec:
    """Return a model from transformers' configuration, as `described`."""
    text = config.get_text_config(decoder=True)
    if text is not config:
        tied = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
        text = type(text).from_dict(text.to_dict() | {"tie_word_embeddings": tied})
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16)
        model.train()
        return _KindSurvey(model).spec(name)
    except Exception as error:  # of transformers, and of the model's own code on tensors without values
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(
            f"model {name}: what layers of model_type '{text.model_type}' compute cannot be told from transformers' "
            f"model ({why}); plan a model whose layers come closest, such as a built-in one"
        ) from error


class _KindSurvey(structure.Survey):
    """Notes what layers compute, and makes kinds of them."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model, WholeModel(model, find_layers(model)))
        self.kinds: list[LayerKind] = []
        self.hidden_size = 0
        self._begin()

    def _begin(self) -> None:
        self._products: list[tuple[str, Product]] = []
        self._inputs: set[tuple[int, int]] = set()
        self._attention: list[AttentionKind] = []
        self._experts: ExpertsKind | None = None
        self._router = self._cast_router = self._chosen = 0
        self._choices: list[tuple[str, int]] = []
        self._stacked: list[Tensor] = []  # weights of all experts, [E, in, out], in code of the model's own
        self._mixer = self._mixer_path = self._attention_path = ""
        self._columns = 0  # weights of biases that tensor parallelism divides
        self._row_biases = False

    def spec(self, name: str) -> ModelSpec:
        """Run the model and return what planning reads of it."""
        positions = torch.arange(structure.SURVEYED_ROWS, device="meta")
        like = torch.empty(structure.SURVEYED_ROWS, 1, device="meta", dtype=self.model.dtype)
        try:
            with using(self.whole.configs, _NAME), self.hooks():
                self.whole.run(positions, self.run_layer, token_ids=positions, like=like)
        finally:
            self.whole.restore()
        model: Any = self.model
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        modules = [self.model.get_submodule(path) for path in self.prologue]
        before = {id(one): one.numel() for module in modules for one in module.parameters(recurse=False)}
        rows = [one.num_embeddings for one in modules if isinstance(one, nn.Embedding) and one.weight is not embedding]
        longest = getattr(self.model.config, "max_position_embeddings", 0)
        kinds = tuple(dict.fromkeys(self.kinds))
        layers = tuple(kinds.index(kind) for kind in self.kinds)
        is_tied, of_embedding = head is embedding, head.numel()
        of_layers = sum(kind.parameters for kind in self.kinds)
        total = sum(one.numel() for one in model.parameters())
        positions_before = sum(before.values()) - of_embedding
        return ModelSpec(
            name=name,
            hidden_size=self.hidden_size,
            vocab_size=of_embedding // self.hidden_size,
            kinds=kinds,
            layers=layers,
            norm_parameters=total - of_layers - (1 if is_tied else 2) * of_embedding - positions_before,
            tied_embeddings=is_tied,
            position_parameters=positions_before,
            position_rows=longest if any(longest <= one <= longest + 2 for one in rows) else 0,
        )

    def refuse_dropout(self) -> None:
        """Ignore dropout, which changes no work."""

    def run_layer(self, index: int, call: LayerCall) -> Tensor:
        """Run a layer and make its kind."""
        self._begin()
        self.hidden_size = call.hidden.shape[-1]
        output = super().run_layer(index, call)
        self.kinds.append(self._kind(self.whole.layers[index]))
        return output

    def _kind(self, layer: nn.Module) -> LayerKind:
        sites, experts = self.notes[-1].sites(), self._experts or self._stacked_experts()
        kept = sites.linears - sites.unused
        products = tuple(
            msgspec.structs.replace(
                product, is_read=owner in kept and not self._is_mixed(owner), in_mixer=self._is_mixed(owner)
            )
            for owner, product in self._products
        )
        if experts:
            is_read = not sites.experts <= sites.unused
            choices = sum(count for path, count in self._choices if not self._is_mixed(path))
            routed = {"router": self._router, "cast_router": self._cast_router, "choices": choices}
            experts = msgspec.structs.replace(experts, is_read=is_read, **routed)
        parameters = sum(one.numel() for one in layer.parameters())
        matrices = sum(product.parameters for product in dict(self._products).values())
        divided = matrices + self._columns + (experts.count * experts.parameters if experts else 0)
        if 2 * divided < parameters:
            raise ValueError(f"most weights of layer {len(self.kinds)} take part in no product of every token")
        # Two calls of attention in a layer (LongCat) are one of as many heads.
        attention = self._attention[0] if self._attention else None
        if attention and len(self._attention) > 1:
            count = len(self._attention)
            heads, kv_heads = count * attention.heads, count * attention.kv_heads
            attention = msgspec.structs.replace(attention, heads=heads, kv_heads=kv_heads)
        if attention and self._is_mixed(self._attention_path):
            attention = msgspec.structs.replace(attention, is_kept=False)
        return LayerKind(
            products=products,
            parameters=parameters,
            copied_parameters=parameters - divided,
            attention=attention,
            experts=experts,
            mixer=self._mixer,
            biases=self._row_biases,
        )

    def _stacked_experts(self) -> ExpertsKind | None:
        if not self._stacked:
            return None
        (count, width, outputs), inner = self._stacked[0].shape, self._stacked[-1].shape[1]
        return ExpertsKind(count=count, chosen=self._chosen, width=width, inner=inner, gated=outputs == 2 * inner)

    def _multiply(self, notes: Any, weight: Tensor, args: Any, output: Tensor) -> None:
        super()._multiply(notes, weight, args, output)
        owner = self._owners.get(id(weight))
        if owner is None:
            return
        if owner in notes.choosing:
            self._router += output.shape[-1]
            return
        given = args[1] if isinstance(self._stack[-1], Conv1D) else args[0]
        key = (structure.storage_of(given), given.shape[-1])
        count = given.numel() // given.shape[-1]
        product = Product(
            name=owner.rpartition(".")[2],
            inputs=given.shape[-1],
            outputs=output.shape[-1],
            rows=max(1, count // structure.SURVEYED_ROWS),
            shares_input=key in self._inputs,
        )
        self._inputs.add(key)
        self._alive.append(given)
        bias = getattr(self._stack[-1], "bias", None)
        if isinstance(bias, nn.Parameter):
            is_of_rows = output.shape[-1] == self.hidden_size
            self._row_biases |= is_of_rows
            self._columns += 0 if is_of_rows else bias.numel()
        self._products.append((owner, product))

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], output: Any, made: list[Tensor]) -> None:
        super()._note(func, args, kwargs, tensors, output, made)
        name = getattr(func, "__name__", "")
        if name == "topk":
            path = next((self._inner[id(one)] for one in reversed(self._stack) if id(one) in self._inner), "")
            self._choices.append((path, made[-1].numel() // structure.SURVEYED_ROWS))
            self._chosen = made[-1].shape[-1]
        if name == "linear" and not isinstance(args[1], nn.Parameter):
            own = {one.shape for one in self._stack[-1].parameters(recurse=False)}
            self._cast_router += output.shape[-1] * (args[1].shape in own)
        if name in _SCORES and isinstance(args[1], nn.Parameter) and args[1].ndim > 2:
            self._stacked.append(args[1])
        if self._mixes(name, args, kwargs, tensors, made):
            self.note_mixer()

    def note_mixer(self) -> None:
        """Note that the running module mixes tokens."""
        own = next(one for one in reversed(self._stack) if not type(one).__module__.startswith("torch."))
        if not self._mixer:
            self._mixer, self._mixer_path = type(own).__name__, self._inner.get(id(own), "")

    def _is_mixed(self, path: str) -> bool:
        inside = f"{self._mixer_path}." if self._mixer_path else ""
        return bool(self._mixer) and f"{path}.".startswith(inside)

    def _mixes(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], made: list[Tensor]) -> bool:
        rows = structure.SURVEYED_ROWS
        if name == "arange":
            return rows in args or kwargs.get("end") == rows
        if not tensors:
            return False
        shape = tensors[0].shape
        if name == "conv1d":
            return True
        if name in ("cumsum", "cumprod"):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return shape[dim] == rows
        if name == "pad":
            return rows in shape[:-1] and rows not in made[0].shape[:-1]
        if name in _SCORES and len(tensors) == 2 and min(len(shape), tensors[1].ndim) > 1:
            return shape[-1] == rows or (shape[-2] == rows and tensors[1].shape[-1] == rows)
        return False

    def note_attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, given: Any
    ) -> None:
        """Note a call of attention."""
        rule = getattr(mask, "rule", None)
        others = [name for name, one in given.items() if isinstance(one, Tensor) and name not in _KNOWN_TENSORS]
        if others or getattr(rule, "refusal", ""):
            self.note_mixer()
        self._attention_path = self._inner[id(module)]
        self._attention.append(
            AttentionKind(
                heads=query.shape[1],
                kv_heads=key.shape[1],
                head_dim=query.shape[-1],
                value_dim=value.shape[-1],
                window=getattr(rule, "window", 0),
                chunk=getattr(rule, "chunk", 0),
                sinks=given.get("s_aux") is not None,
                soft_cap=float(given.get("softcap") or 0.0),
            )
        )

    def note_experts(self, module: Any, hidden_states: Tensor, top_k_index: Tensor) -> None:
        """Note a block of experts."""
        width, count = hidden_states.shape[-1], module.down_proj.shape[0]
        self._experts = ExpertsKind(
            count=count,
            chosen=top_k_index.shape[-1],
            width=width,
            inner=module.down_proj.numel() // (count * width),
            gated=bool(module.has_gate),
        )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    survey: Any = structure.RUNNING[-1]
    survey.note_attention(module, query, key, value, attention_mask, given)
    output = query.transpose(1, 2)[..., :1] + key.sum() + value.sum() + value.new_zeros(value.shape[-1])
    return output, None


def _mask(**given: Any) -> Tensor:
    mask = torch.zeros(1, 1, structure.SURVEYED_ROWS, structure.SURVEYED_ROWS, device="meta")
    mask.rule = mask_rule(**given)  # type: ignore[attr-defined]
    return mask


def _mix_experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    survey: Any = structure.RUNNING[-1]
    survey.note_experts(module, hidden_states, top_k_index)
    return structure.mix_experts(module, hidden_states, top_k_index, top_k_weights)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _mask)
ALL_EXPERTS_FUNCTIONS.register(_NAME, _mix_experts)
