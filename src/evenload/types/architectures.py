"""Describe every architecture of decoders that can be planned or trained (`Architecture`), without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Functions of single elements, so any of them replays exactly.
_ACTIVATIONS = frozenset({"SiLUActivation", "SiLU", "GELUTanh", "GELUActivation", "NewGELUActivation"})


@dataclass(frozen=True)
class ExpertNames:
    """Names of a block of experts ("mlp" in other layers) and of an expert's three matrices in safetensors files, which
    transformers fuses when it loads them."""

    block: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class ModuleNames:
    """Names of the parts of transformers' whole models, and so of the tensors in files: of the decoder (all but the
    head, which is "lm_head"); in it of embedding, learned positions ("" = rotary ones, without weights), layers and
    last norm; in a layer of the attention, its linear that makes queries, keys and values at once ("" = one each), and
    the last linear, after which only the residual sum follows."""

    decoder: str = "model"
    embedding: str = "embed_tokens"
    positions: str = ""
    layers: str = "layers"
    norm: str = "norm"
    attention: str = "self_attn"
    fused: str = ""
    last_linear: str = "mlp.down_proj"

    @property
    def embedding_path(self) -> str:
        """Name of the embedding in the whole model."""
        return f"{self.decoder}.{self.embedding}"

    @property
    def positions_path(self) -> str:
        """Name of the learned positions in the whole model."""
        return f"{self.decoder}.{self.positions}"

    @property
    def norm_path(self) -> str:
        """Name of the last norm in the whole model."""
        return f"{self.decoder}.{self.norm}"

    def layer_path(self, index: int) -> str:
        """Return the name of a layer in the whole model."""
        return f"{self.decoder}.{self.layers}.{index}"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One `model_type` of Hugging Face configurations.

    Layers must be those that `ModelSpec` describes: alike, with attention over keys and values of every head, and one
    feed-forward block or one block of experts; tests/types compares weights with transformers'. Training also needs the
    names of transformers' classes, whose layers replay runs as they are: an unknown module might mix documents, draw
    random numbers, or depend on the length of the pack. tests/runtime compares gradients with plain training.

    Args:
        tied: the head shares the embedding's weights where the configuration does not say.
        gated: three matrices in the feed-forward block.
        ffn_factor: width of the feed-forward block in hidden sizes where the configuration does not say; 0 = it must.
        post_norm: norms follow attention and feed-forward block.
        causal: False for encoders.
        full_every: layers whose number, from 1, it divides have no window; 0 = all have one.
        pattern_key: the key of `full_every`, where there is one.
        optional_window: a window counts only with `use_sliding_window`.
        first_layers_full: the first `max_window_layers` have no window.
        nested_in: `model_type` of a model of text and pictures with this decoder in `text_config`; the encoder of
            pictures is not counted.
        keys: names of keys where they are not the usual ones.
        defaults: of keys that a nested configuration leaves out.
        classes: prefix of transformers' class names; "" = planned only, not trained.
        whole_class: transformers' class of the whole model, where it is not "...ForCausalLM".
        more_modules: further classes of modules that a layer may hold.
        names: of the parts of the whole model.
        biases: matrices of layers and norms have biases.
        dropouts: keys of the probabilities that must be 0.
        norm_first: a norm lies between a layer's input and its first linears.
        soft_cap_key: of the limit of attention scores, by a tanh.
        experts: names in every layer; None = dense.
        column_linears, row_linears: cut by output and by input under tensor parallelism.
        blocks: whose input every tensor-parallel rank needs whole.
        uncut: why tensor parallelism cannot cut it; "" = it can.
        unadapted: why its linears get no adapters (LoRA); "" = they can.
    """

    model_type: str
    tied: bool = False
    gated: bool = True
    ffn_factor: int = 0
    post_norm: bool = False
    causal: bool = True
    full_every: int = 0
    pattern_key: str = ""
    optional_window: bool = False
    first_layers_full: bool = False
    nested_in: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    classes: str = ""
    whole_class: str = ""
    more_modules: tuple[str, ...] = ()
    names: ModuleNames = ModuleNames()
    biases: bool = False
    dropouts: tuple[str, ...] = ("attention_dropout",)
    norm_first: bool = True
    soft_cap_key: str = ""
    experts: ExpertNames | None = None
    column_linears: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    row_linears: tuple[str, ...] = ("o_proj", "down_proj")
    blocks: tuple[str, ...] = ("self_attn", "mlp")
    uncut: str = ""
    unadapted: str = ""

    @property
    def causal_class(self) -> str:
        """transformers' class of the whole model."""
        return self.whole_class or f"{self.classes}ForCausalLM"

    @property
    def layers_key(self) -> str:
        """The key of the number of layers in config.json."""
        return self.keys.get("num_hidden_layers", "num_hidden_layers")

    @property
    def layer_classes(self) -> frozenset[str]:
        """Classes of modules that a layer may hold."""
        block = ("SparseMoeBlock", "TopKRouter", "Experts") if self.experts else ("MLP",)
        own = {f"{self.classes}{part}" for part in ("DecoderLayer", "Attention", "RMSNorm", *block)}
        return _ACTIVATIONS | own | {"Linear", *self.more_modules}

    @property
    def unused_outputs(self) -> tuple[str, ...]:
        """Linears of a layer whose output no backward reads: a pre-norm layer's down projection only feeds the residual
        sum; a norm behind it would read it."""
        return () if self.post_norm or self.experts else (self.names.last_linear,)

    def windows(self, config: Mapping[str, Any], window: int, num_layers: int) -> tuple[int, ...]:
        """Return the attention window of every layer in tokens, 0 = none, by the pattern of the architecture."""
        period = config.get(self.pattern_key) or self.full_every
        first = (config.get("max_window_layers") or 0) if self.first_layers_full else 0
        return tuple(
            0 if index < first or (period and (index + 1) % period == 0) else window for index in range(num_layers)
        )


EXPERTS_UNCUT = "has experts: their matrices are not cut in this version"
"""Why tensor parallelism refuses a model with experts."""

_ALL = (
    Architecture(model_type="gemma", classes="Gemma", tied=True),
    Architecture(
        model_type="gemma2",
        classes="Gemma2",
        tied=True,
        post_norm=True,
        full_every=2,
        soft_cap_key="attn_logit_softcapping",
    ),
    # Its configuration has the key of the soft cap, too, but transformers' model does not read it.
    Architecture(
        model_type="gemma3_text",
        nested_in="gemma3",
        classes="Gemma3",
        tied=True,
        post_norm=True,
        full_every=6,
        pattern_key="sliding_window_pattern",
        defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208},
    ),
    Architecture(
        model_type="gpt2",
        classes="GPT2",
        whole_class="GPT2LMHeadModel",
        more_modules=("GPT2Block", "LayerNorm", "Conv1D", "Dropout"),
        names=ModuleNames(
            decoder="transformer",
            embedding="wte",
            positions="wpe",
            layers="h",
            norm="ln_f",
            attention="attn",
            fused="c_attn",
            last_linear="mlp.c_proj",
        ),
        tied=True,
        gated=False,
        biases=True,
        ffn_factor=4,
        keys={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
        defaults={"max_position_embeddings": 1024},
        dropouts=("attn_pdrop", "resid_pdrop", "embd_pdrop"),
        uncut="makes queries, keys and values with one matrix, whose columns of a head are not together",
        unadapted="keeps its matrices as transformers' Conv1D, and adapters are put on nn.Linear only",
    ),
    Architecture(model_type="llama", classes="Llama"),
    Architecture(model_type="mistral", classes="Mistral"),
    Architecture(
        model_type="mixtral",
        classes="Mixtral",
        experts=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
        uncut=EXPERTS_UNCUT,
    ),
    Architecture(model_type="olmo"),
    Architecture(
        model_type="olmo2",
        classes="Olmo2",
        post_norm=True,
        norm_first=False,
        uncut="norms all query heads together, which lie on different ranks",
    ),
    Architecture(model_type="olmo3", post_norm=True, full_every=4),
    Architecture(model_type="olmoe"),
    Architecture(model_type="bert", tied=True, gated=False, causal=False),
    Architecture(model_type="gpt_neox", gated=False),
    Architecture(model_type="granite"),
    Architecture(model_type="phi", gated=False),
    Architecture(model_type="phi3"),
    Architecture(model_type="roberta", tied=True, gated=False, causal=False),
    Architecture(model_type="seed_oss"),
    Architecture(model_type="starcoder2", tied=True, gated=False),
    Architecture(model_type="qwen2", classes="Qwen2", optional_window=True, first_layers_full=True),
    Architecture(model_type="qwen3", classes="Qwen3", optional_window=True, first_layers_full=True),
    Architecture(
        model_type="qwen3_moe",
        classes="Qwen3Moe",
        optional_window=True,
        experts=ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
        uncut=EXPERTS_UNCUT,
    ),
)

ARCHITECTURES: Mapping[str, Architecture] = {one.model_type: one for one in _ALL}
"""What can be planned; others are refused by name, because they would be planned wrong."""

TRAINED: Mapping[str, Architecture] = {one.causal_class: one for one in _ALL if one.classes}
"""What can be trained, by transformers' class of the whole model; proven equal to transformers by tests/runtime."""
