"""Define `ModelSpec`, the numbers about a transformer that decide work, memory and communication; read it from a
Hugging Face configuration, or find it by name."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from evenload.errors import ConfigError
from evenload.types.architectures import ARCHITECTURES, Architecture
from evenload.types.base import Frozen, require_at_least_one
from evenload.types.text import scaled

_POSITIVE = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size",
    "bytes_per_element",
)  # fmt: skip


AttentionKernels = Literal["varlen_cuda", "varlen_cuda_fa3", "varlen_cuda_fa4"]
"""Attention kernels of GPUs by name of the backend (`train.attention`): FlashAttention 2, 3 and 4."""


def attention_kernels(backend: str) -> AttentionKernels:
    """Return the kernels of a backend; FlashAttention 2's of one that has none, or is not chosen yet ("auto")."""
    return next((name for name in get_args(AttentionKernels) if name == backend), "varlen_cuda")


class ModelSpec(Frozen):
    """Shape of a transformer, enough to cost it without instantiating it.

    Args:
        name: shown to users; does not influence any number.
        num_layers, hidden_size, num_heads: decoder layers, width of the residual stream, query heads.
        num_kv_heads: key/value heads (GQA when smaller than `num_heads`).
        head_dim: width of one head; `num_heads * head_dim` may differ from `hidden_size`.
        ffn_hidden_size: inner width of the feed-forward block (of one expert for MoE).
        vocab_size: rows of the embedding.
        tied_embeddings: the head shares the embedding's weights.
        gated_ffn: three matrices (SwiGLU) instead of two.
        num_experts, experts_per_token: 0 for dense models.
        sliding_windows: attention window of every layer in tokens, 0 = full; empty = all full.
        post_norm: norms follow attention and feed-forward block, so backward reads the output of their last product.
        biases: matrices and norms of layers have biases; those of other models are not counted.
        position_rows: of learned positions, the longest document (GPT-2); 0 = not counted.
        adapter_parameters_per_layer: the only trained weights of a layer (LoRA); 0 = all weights are trained.
        causal: False for bidirectional encoders, which cannot be sliced.
        bytes_per_element: of weights and activations in compute precision (bf16: 2).
        attention_workspace: attention runs in GPU kernels, whose workspace in backward is counted.
        attention_kernels: which ones.
        ordered_attention: these add in one order (`train.deterministic`), for which they need more.
        fused_cross_entropy: a kernel makes the gradient in the logits themselves, where the vocabulary is not divided.
        averaged_weights: a moving average of trained weights is kept with the optimizer's state (`train.ema_decay`).
        bfloat16_moments: of AdamW, with the lower halves of bf16 weights' masters (`optimizer.moments`).
        unit_gradients: there are gradients of one unit at a time (`optimizer.in_backward`).
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied_embeddings: bool = False
    gated_ffn: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    sliding_windows: tuple[int, ...] = ()
    post_norm: bool = False
    biases: bool = False
    position_rows: int = 0
    adapter_parameters_per_layer: int = 0
    causal: bool = True
    bytes_per_element: int = 2
    attention_workspace: bool = False
    attention_kernels: AttentionKernels = "varlen_cuda"
    ordered_attention: bool = False
    fused_cross_entropy: bool = False
    averaged_weights: bool = False
    bfloat16_moments: bool = False
    unit_gradients: bool = False

    def __post_init__(self) -> None:
        require_at_least_one(f"model {self.name}: ", self, *_POSITIVE)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: {self.num_heads} query heads do not divide into "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"model {self.name}: {len(self.sliding_windows)} sliding windows for {self.num_layers} layers"
            )
        for field in ("adapter_parameters_per_layer", "position_rows"):
            if getattr(self, field) < 0:
                raise ConfigError(f"model {self.name}: {field} is {getattr(self, field)}, must be 0 or more")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"model {self.name}: experts_per_token {self.experts_per_token} is outside 1..{self.num_experts}"
            )

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of every layer in tokens, 0 = full. Length `num_layers`."""
        return self.sliding_windows or (0,) * self.num_layers

    def _matrix_parameters(self, experts: int) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = (3 if self.gated_ffn else 2) * self.hidden_size * self.ffn_hidden_size
        return attention + ffn * max(1, experts)

    @property
    def linear_parameters_per_layer(self) -> int:
        """Weights of one layer's matrices that one token uses (active experts only)."""
        return self._matrix_parameters(self.experts_per_token)

    @property
    def stored_parameters_per_layer(self) -> int:
        """Weights of one layer held in memory: matrices (of all experts), router, norms, and biases if counted."""
        router_and_norms = self.hidden_size * (self.num_experts + 2)
        return self._matrix_parameters(self.num_experts) + router_and_norms + self.biases_per_layer

    @property
    def biases_per_layer(self) -> int:
        """Biases of the matrices and the two norms of one layer; 0 where they are not counted."""
        if not self.biases:
            return 0
        inner = (2 if self.gated_ffn else 1) * self.ffn_hidden_size
        return self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + inner + 4 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding (and of the head, which has the same shape)."""
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        """Weights of learned positions; 0 = there are none."""
        return self.position_rows * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Weights of one norm."""
        return (2 if self.biases else 1) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model with all experts and without adapters; a tied head counts once."""
        return self.num_layers * self.stored_parameters_per_layer + self._outer_parameters

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token uses: all of a dense model, the chosen experts of others."""
        router_and_norms = self.hidden_size * (self.num_experts + 2) + self.biases_per_layer
        return self.num_layers * (self.linear_parameters_per_layer + router_and_norms) + self._outer_parameters

    def describe_size(self) -> str:
        """Return the number of parameters in words, and how many of them one token uses where there are experts."""
        total, active = (
            scaled(count, 1000.0, ("", "K", "M", "B", "T"), separator="")
            for count in (self.num_parameters, self.num_active_parameters)
        )
        return f"{total} parameters" + (f", {active} active" if self.num_experts else "")

    @property
    def _outer_parameters(self) -> int:
        """Embedding with positions, head and final norm."""
        embeddings = (1 if self.tied_embeddings else 2) * self.embedding_parameters
        return embeddings + self.position_parameters + self.norm_parameters


_NESTED = {one.nested_in: one.model_type for one in ARCHITECTURES.values() if one.nested_in}

_COSTLY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "latent attention": ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
    "experts of another layout": ("n_routed_experts", "moe_num_experts", "num_experts_per_token"),
    "shared experts": ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size"),
    "some layers dense, others with experts": ("first_k_dense_replace", "moe_layer_freq", "interleave_moe_layer_step"),
    "multi-token prediction": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "linear attention": ("linear_num_value_heads", "linear_key_head_dim", "linear_attn_config"),
    "state-space layers": ("mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size", "hybrid_override_pattern"),
    "layers of several kinds": ("layers_block_type", "block_types", "attn_layer_indices", "attn_type_list"),
    "chunked or sparse attention": ("attention_chunk_size", "index_topk", "sparse_attention_config"),
}
"""Fields that change what a layer costs, by what they stand for; absent, null, 0 and empty do no harm."""

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def model_from_hf_config(config: Mapping[str, Any], name: str, bytes_per_element: int = 2) -> ModelSpec:
    """Read a parsed Hugging Face `config.json`; `ConfigError` where a needed key is missing, or an architecture or a
    field would be costed wrong. The name is for messages."""
    config, architecture = _decoder(config, name)
    hidden = _needed(config, "hidden_size", name)
    heads = _needed(config, "num_attention_heads", name)
    layers = _needed(config, "num_hidden_layers", name)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = (config.get("moe_intermediate_size") if experts else None) or config.get("intermediate_size")
    if inner is None and architecture.ffn_factor:
        inner = architecture.ffn_factor * hidden
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn_hidden_size=_needed({"intermediate_size": inner}, "intermediate_size", name),
        vocab_size=_needed(config, "vocab_size", name),
        # A key that has its default value is often missing in a config.json.
        tied_embeddings=bool(config.get("tie_word_embeddings", architecture.tied)),
        gated_ffn=architecture.gated,
        num_experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or 0,
        sliding_windows=_sliding_windows(config, architecture, layers),
        post_norm=architecture.post_norm,
        biases=architecture.biases,
        position_rows=_needed(config, "max_position_embeddings", name) if architecture.names.positions else 0,
        causal=architecture.causal,
        bytes_per_element=bytes_per_element,
    )


def _decoder(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], Architecture]:
    """Return the part of a configuration that describes a decoder, with the usual keys, and its architecture."""
    outer = config.get("model_type")
    if outer in _NESTED and isinstance(config.get("text_config"), Mapping):
        tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = {"model_type": _NESTED[outer], **tied, **config["text_config"]}
    model_type = config.get("model_type")
    costly = "; ".join(_costly_fields(config))
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        why = f", and its config.json has {costly}" if costly else ""
        known = f"has model_type '{model_type}', which is not known{why}"
        named = "names no model_type" if model_type is None else known
        raise ConfigError(
            f"model {name}: config.json {named}, so its work and memory cannot be told; known: "
            f"{', '.join(sorted({*ARCHITECTURES, *_NESTED}))}. A config.json of your own with the model_type whose "
            "layers come closest ('llama', or 'mixtral' with experts) is planned as that"
        )
    if costly:
        raise ConfigError(
            f"model {name}: config.json of model_type '{model_type}' has {costly}, which the cost model does not "
            "describe, so that plans would be wrong; without these fields it is planned as if they were not there"
        )
    renamed = {usual: config[own] for usual, own in architecture.keys.items() if config.get(own) is not None}
    return {**architecture.defaults, **config, **renamed}, architecture


def _costly_fields(config: Mapping[str, Any]) -> Iterator[str]:
    for what, fields in _COSTLY_FIELDS.items():
        if present := [f"{name} {config[name]}" for name in fields if config.get(name)]:
            yield f"{what} ({', '.join(present)})"
    if others := sorted({str(kind) for kind in config.get("layer_types") or ()} - _LAYER_TYPES):
        yield f"layers that are neither full nor sliding attention (layer_types {', '.join(others)})"
    dense, step = config.get("mlp_only_layers"), config.get("decoder_sparse_step", 1)
    if dense or step not in (None, 1):
        yield f"some layers without experts (mlp_only_layers {dense or []}, decoder_sparse_step {step})"


def _needed(config: Mapping[str, Any], key: str, name: str) -> int:
    if not isinstance(config.get(key), int):
        raise ConfigError(f"model {name}: config.json has no integer '{key}'; is it a decoder's config?")
    return config[key]


def _sliding_windows(config: Mapping[str, Any], architecture: Architecture, layers: int) -> tuple[int, ...]:
    """Return the window of every layer as transformers applies it: by `layer_types`, else by the architecture."""
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", not architecture.optional_window):
        return ()
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return architecture.windows(config, window, layers)


class _Row(NamedTuple):
    """A built-in model; 0 key/value heads = as many as query heads, 0 head_dim = the width divided by the heads."""

    name: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    experts: int = 0
    chosen: int = 0
    window: int = 0
    positions: int = 0


_LLAMA3, _QWEN3 = 128_256, 151_936
_GPT3_CONTEXT = 2048
# `llama-*`: SlimPack Table 3 (vocabulary 32,000). `wlb-*`: WLB-LLM §7.1, which gives only 7B (LLaMA-2-7B); others scale
# layers and width in proportion (30B has 64 heads of 104, because 52 of 128 do not divide over tp=8). `gpt-*` and
# `bert-*`: FlexPipe Table 1 (its width 5140 means 5120). Others: their public config.json, of Gemma 3 the text part.
_ROWS = (
    _Row("llama-7b", "llama", 32, 4096, 32, 0, 0, 11008, 32_000),
    _Row("llama-13b", "llama", 40, 5120, 40, 0, 0, 13824, 32_000),
    _Row("llama-70b", "llama", 80, 8192, 64, 8, 0, 28672, 32_000),
    _Row("llama-150b", "llama", 96, 12288, 96, 8, 0, 32768, 32_000),
    _Row("wlb-550m", "llama", 16, 1536, 12, 0, 0, 4096, 32_000),
    _Row("wlb-7b", "llama", 32, 4096, 32, 0, 0, 11008, 32_000),
    _Row("wlb-30b", "llama", 60, 6656, 64, 0, 0, 17920, 32_000),
    _Row("wlb-70b", "llama", 80, 8192, 64, 8, 0, 28672, 32_000),
    _Row("gpt-3.35b", "gpt2", 16, 4096, 32, 0, 0, 16384, 50_257, positions=_GPT3_CONTEXT),
    _Row("gpt-13b", "gpt2", 40, 5120, 40, 0, 0, 20480, 50_257, positions=_GPT3_CONTEXT),
    _Row("bert-340m", "bert", 24, 1024, 16, 0, 0, 4096, 30_522),
    _Row("bert-1.36b", "bert", 96, 1024, 16, 0, 0, 4096, 30_522),
    _Row("qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 64, 4864, 151_936, tied=True),
    _Row("qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 128, 18944, 152_064),
    _Row("llama3-8b", "llama", 32, 4096, 32, 8, 128, 14336, _LLAMA3),
    _Row("llama3-70b", "llama", 80, 8192, 64, 8, 128, 28672, _LLAMA3),
    _Row("llama3.1-405b", "llama", 126, 16384, 128, 8, 128, 53248, _LLAMA3),
    _Row("llama3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, _LLAMA3, tied=True),
    _Row("llama3.2-3b", "llama", 28, 3072, 24, 8, 128, 8192, _LLAMA3, tied=True),
    _Row("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, _QWEN3, tied=True),
    _Row("qwen3-1.7b", "qwen3", 28, 2048, 16, 8, 128, 6144, _QWEN3, tied=True),
    _Row("qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, _QWEN3, tied=True),
    _Row("qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12288, _QWEN3),
    _Row("qwen3-14b", "qwen3", 40, 5120, 40, 8, 128, 17408, _QWEN3),
    _Row("qwen3-32b", "qwen3", 64, 5120, 64, 8, 128, 25600, _QWEN3),
    _Row("qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 4, 128, 768, _QWEN3, experts=128, chosen=8),
    _Row("qwen3-235b-a22b", "qwen3_moe", 94, 4096, 64, 4, 128, 1536, _QWEN3, experts=128, chosen=8),
    _Row("mixtral-8x7b", "mixtral", 32, 4096, 32, 8, 128, 14336, 32_000, experts=8, chosen=2),
    _Row("mixtral-8x22b", "mixtral", 56, 6144, 48, 8, 128, 16384, 32_768, experts=8, chosen=2),
    _Row("gemma3-1b", "gemma3_text", 26, 1152, 4, 1, 256, 6912, 262_144, window=512),
    _Row("gemma3-4b", "gemma3_text", 34, 2560, 8, 4, 256, 10240, 262_208, window=1024),
    _Row("gemma3-12b", "gemma3_text", 48, 3840, 16, 8, 256, 15360, 262_208, window=1024),
    _Row("gemma3-27b", "gemma3_text", 62, 5376, 32, 16, 128, 21504, 262_208, window=1024),
)


def _spec(row: _Row) -> ModelSpec:
    architecture = ARCHITECTURES[row.model_type]
    return ModelSpec(
        name=row.name,
        num_layers=row.layers,
        hidden_size=row.hidden,
        num_heads=row.heads,
        num_kv_heads=row.kv_heads or row.heads,
        head_dim=row.head_dim or row.hidden // row.heads,
        ffn_hidden_size=row.ffn,
        vocab_size=row.vocab,
        tied_embeddings=row.tied or architecture.tied,
        gated_ffn=architecture.gated,
        num_experts=row.experts,
        experts_per_token=row.chosen,
        sliding_windows=architecture.windows({}, row.window, row.layers) if row.window else (),
        post_norm=architecture.post_norm,
        biases=architecture.biases,
        position_rows=row.positions,
        causal=architecture.causal,
    )


MODELS: dict[str, ModelSpec] = {row.name: _spec(row) for row in _ROWS}
"""Built-in models by name."""

MODEL_TYPES: dict[str, str] = {row.name: row.model_type for row in _ROWS}
"""Their architecture, by transformers' `model_type`."""
