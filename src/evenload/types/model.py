"""Define `ModelSpec`, the numbers about a transformer that decide work, memory and communication, and find the built-in
ones by name."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from evenload.errors import ConfigError
from evenload.types.base import Frozen, require_at_least_one
from evenload.types.layer_kind import AttentionKind, ExpertsKind, LayerKind, Product
from evenload.types.text import scaled

AttentionKernels = Literal["varlen_cuda", "varlen_cuda_fa3", "varlen_cuda_fa4"]
"""Attention kernels of GPUs by name of the backend (`train.attention`): FlashAttention 2, 3 and 4."""


def attention_kernels(backend: str) -> AttentionKernels:
    """Return the kernels of a backend; FlashAttention 2's of one that has none, or is not chosen yet ("auto")."""
    return next((name for name in get_args(AttentionKernels) if name == backend), "varlen_cuda")


class ModelSpec(Frozen):
    """Shape of a transformer, enough to cost it without instantiating it.

    Args:
        name: shown to users; does not influence any number.
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding, and of the head.
        kinds: of layers; layers: the index of every layer's kind.
        norm_parameters: weights behind the last layer, without the head's matrix.
        tied_embeddings: the head shares the embedding's weights.
        position_parameters: weights before the first layer, without the embedding: of learned positions and the like.
        position_rows: of learned positions, the longest document (GPT-2); 0 = no limit.
        causal: False for bidirectional encoders, which cannot be sliced.
        tensor_refusal: why Evenload's runtime does not cut it over tensor-parallel ranks; "" = it does.
        bytes_per_element: of weights and activations in compute precision (bf16: 2).
        attention_workspace: attention runs in GPU kernels, whose workspace in backward is counted.
        attention_kernels: which ones.
        ordered_attention: these add in one order (`train.deterministic`), for which they need more.
        fused_cross_entropy: a kernel makes the gradient in the logits themselves, where the vocabulary is not divided.
        averaged_weights: a moving average of trained weights is kept with the optimizer's state (`train.ema_decay`).
        bfloat16_moments: of AdamW, with the lower halves of bf16 weights' masters (`optimizer.moments`).
        offloaded_state: pipeline stages whose ranks keep the optimizer's state in host memory
            (`optimizer.offload_stages`).
        unit_gradients: there are gradients of one unit at a time (`optimizer.in_backward`).
    """

    name: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[LayerKind, ...]
    layers: tuple[int, ...]
    norm_parameters: int
    tied_embeddings: bool = False
    position_parameters: int = 0
    position_rows: int = 0
    causal: bool = True
    tensor_refusal: str = ""
    bytes_per_element: int = 2
    attention_workspace: bool = False
    attention_kernels: AttentionKernels = "varlen_cuda"
    ordered_attention: bool = False
    fused_cross_entropy: bool = False
    averaged_weights: bool = False
    bfloat16_moments: bool = False
    unit_gradients: bool = False
    offloaded_state: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = "hidden_size", "vocab_size", "bytes_per_element", "num_layers"
        require_at_least_one(f"model {self.name}: ", self, *counts)
        if set(self.layers) != set(range(len(self.kinds))):
            raise ConfigError(
                f"model {self.name}: its layers are of the kinds {sorted(set(self.layers))}, and there are "
                f"{len(self.kinds)}; number them from 0, and name each"
            )
        for field in ("norm_parameters", "position_parameters", "position_rows"):
            if getattr(self, field) < 0:
                raise ConfigError(f"model {self.name}: {field} is {getattr(self, field)}, must be 0 or more")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of every layer in tokens, 0 = full, or no attention. Length `num_layers`."""
        of_kinds = [kind.attention.window if kind.attention else 0 for kind in self.kinds]
        return tuple(of_kinds[kind] for kind in self.layers)

    @property
    def attentions(self) -> tuple[AttentionKind, ...]:
        """Attention of the kinds that have any."""
        return tuple(kind.attention for kind in self.kinds if kind.attention)

    @property
    def head_dim(self) -> int:
        """Width of the widest head; 0 = no layer has attention."""
        return max((max(one.head_dim, one.value_dim) for one in self.attentions), default=0)

    @property
    def num_experts(self) -> int:
        """Experts of the layer that has most; 0 for dense models."""
        return max(kind.experts.count if kind.experts else 0 for kind in self.kinds)

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return any(kind.adapter_parameters for kind in self.kinds)

    @property
    def mixers(self) -> tuple[str, ...]:
        """Classes of modules that mix tokens in a way of their own, which need documents whole."""
        return tuple(dict.fromkeys(kind.mixer for kind in self.kinds if kind.mixer))

    @property
    def may_cut_documents(self) -> bool:
        """Whether slices of a document give what the whole document gives."""
        return self.causal and not self.mixers

    @property
    def whole_documents(self) -> str:
        """Say why documents are not cut; "" = they may be."""
        if self.may_cut_documents:
            return ""
        why = "tokens see the whole document" if not self.causal else "these mix tokens in a way of their own"
        return f"documents stay whole, without slices or sharing: {', '.join((self.name, *self.mixers))}: {why}"

    @property
    def state_functions(self) -> tuple[str, ...]:
        """Functions that carry a state along a document, of any layer."""
        return tuple(dict.fromkeys(one.function for kind in self.kinds for one in kind.states))

    @property
    def kind_counts(self) -> tuple[int, ...]:
        """Count the layers of every kind."""
        counts = Counter(self.layers)
        return tuple(counts[kind] for kind in range(len(self.kinds)))

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding (and of the head, which has the same shape)."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model with all experts and without adapters; a tied head counts once."""
        counts = zip(self.kind_counts, self.kinds, strict=True)
        return sum(count * kind.parameters for count, kind in counts) + self._outer_parameters

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token uses: all of a dense model, the chosen experts of others."""
        counts = zip(self.kind_counts, self.kinds, strict=True)
        return sum(count * kind.active_parameters for count, kind in counts) + self._outer_parameters

    def describe_size(self) -> str:
        """Return the number of parameters in words, and how many of them one token uses where there are experts."""
        total, active = (
            scaled(count, 1000.0, ("", "K", "M", "B", "T"), separator="")
            for count in (self.num_parameters, self.num_active_parameters)
        )
        return f"{total} parameters" + (f", {active} active" if self.num_experts else "")

    def with_layers(self, layers: tuple[int, ...]) -> "ModelSpec":
        """Return the model with layers of these kinds, as many as are named; kinds without a layer go."""
        kept = sorted(set(layers))
        return msgspec.structs.replace(
            self, kinds=tuple(self.kinds[kind] for kind in kept), layers=tuple(kept.index(kind) for kind in layers)
        )

    @property
    def _outer_parameters(self) -> int:
        """Embedding with positions, head and final norm."""
        embeddings = (1 if self.tied_embeddings else 2) * self.embedding_parameters
        return embeddings + self.position_parameters + self.norm_parameters


class AlikeLayers(Frozen):
    """Sizes of layers that are alike but for their windows, with attention and one feed-forward block or one block of
    experts. Norms count a weight an element, two a layer; other small weights are not counted.

    Args:
        num_layers, num_heads, num_kv_heads, head_dim: decoder layers; query heads, key/value heads, width of a head.
        ffn_hidden_size: inner width of the feed-forward block (of one expert).
        gated_ffn: three matrices (SwiGLU) instead of two.
        num_experts, experts_per_token: 0 for dense models.
        sliding_windows: attention window of every layer in tokens, 0 = full; empty = all full.
        post_norm: norms follow attention and feed-forward block.
        biases: matrices and norms of layers have biases; those of other models are not counted.
        adapter_parameters_per_layer: the only trained weights of a layer (LoRA); 0 = all weights are trained.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    gated_ffn: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    sliding_windows: tuple[int, ...] = ()
    post_norm: bool = False
    biases: bool = False
    adapter_parameters_per_layer: int = 0

    def kind(self, window: int) -> LayerKind:
        """Return the kind of the layers with a window."""
        hidden, inner, biases = self.hidden_size, self.ffn_hidden_size, self.biases
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        products = [
            Product(name="q_proj", inputs=hidden, outputs=query),
            Product(name="k_proj", inputs=hidden, outputs=key_value, shares_input=True),
            Product(name="v_proj", inputs=hidden, outputs=key_value, shares_input=True),
            Product(name="o_proj", inputs=query, outputs=hidden),
        ]
        experts = None
        if count := self.num_experts:
            sizes = {"count": count, "chosen": self.experts_per_token, "width": hidden, "inner": inner}
            kept = {"router": count, "choices": self.experts_per_token}
            experts = ExpertsKind(**sizes, **kept, gated=self.gated_ffn, is_read=self.post_norm)
        else:
            products += [Product(name="gate_proj", inputs=hidden, outputs=inner)] if self.gated_ffn else []
            products.append(Product(name="up_proj", inputs=hidden, outputs=inner, shares_input=self.gated_ffn))
            products.append(Product(name="down_proj", inputs=inner, outputs=hidden, is_read=self.post_norm))
        # Of norms, router, and biases behind a sum over ranks; the other biases are of columns, which are divided.
        copied = hidden * (self.num_experts + 2) + 4 * hidden * biases
        of_columns = biases * (query + 2 * key_value + (2 if self.gated_ffn else 1) * inner)
        matrices = sum(one.parameters for one in products) + (experts.count * experts.parameters if experts else 0)
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        return LayerKind(
            products=tuple(products),
            parameters=matrices + copied + of_columns,
            copied_parameters=copied,
            attention=AttentionKind(heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=dim, window=window),
            experts=experts,
            blocks=1 if experts else 2,
            biases=biases,
            adapter_parameters=self.adapter_parameters_per_layer,
        )


def alike_model(**sizes: Any) -> ModelSpec:
    """Return a model of `AlikeLayers`, whose sizes and other fields of `ModelSpec` are given; `ConfigError` for sizes
    that no model has."""
    own = {name: sizes[name] for name in AlikeLayers.__struct_fields__ if name in sizes}
    others = {name: value for name, value in sizes.items() if name not in own}
    layers, name = msgspec.convert(own, AlikeLayers), sizes["name"]
    windows = layers.sliding_windows or (0,) * layers.num_layers
    if len(windows) != layers.num_layers:
        raise ConfigError(f"model {name}: {len(windows)} sliding windows for {layers.num_layers} layers; give each one")
    distinct = tuple(dict.fromkeys(windows))
    shape = {
        "hidden_size": layers.hidden_size,
        "kinds": tuple(layers.kind(window) for window in distinct),
        "layers": tuple(distinct.index(window) for window in windows),
        "norm_parameters": (2 if layers.biases else 1) * layers.hidden_size,
        "position_parameters": sizes.get("position_rows", 0) * layers.hidden_size,
    }
    return msgspec.convert(shape | others, ModelSpec)


def model_tree(tree: Any) -> Any:
    """Return a model read from JSON as the tree of a `ModelSpec`: files of earlier versions have an `alike_model`."""
    return msgspec.to_builtins(alike_model(**tree)) if isinstance(tree, dict) and "num_layers" in tree else tree


class BuiltIn(Frozen):
    """Hold a built-in model, and the configuration in transformers' keys that it was read from."""

    config: dict[str, Any]
    model: ModelSpec


_BUILT_IN = msgspec.json.decode((Path(__file__).parent / "models.json").read_bytes(), type=dict[str, BuiltIn])

MODELS: dict[str, ModelSpec] = {name: one.model for name, one in _BUILT_IN.items()}
"""Built-in models by name; `tools/make_models.py` makes them."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {name: one.config for name, one in _BUILT_IN.items()}
"""Their configurations, as of a `config.json`."""
