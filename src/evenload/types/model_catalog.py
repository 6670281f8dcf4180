"""Models by name: the shapes of the publications we compare with, and open ones.

Sources: `llama-*` SlimPack Table 3 (vocabulary 32,000); `wlb-*` WLB-LLM §7.1: 7B is LLaMA-2-7B, the others are only
said to scale layers and width in proportion, so 550M, 30B and 70B are our reading (sizes agree within 5 %; 30B has 64
heads of 104, because LLaMA's 52 of 128 do not divide over the tp of 8 that the paper trains it with); `gpt-*` and
`bert-*` FlexPipe Table 1 (its width 5140 does not divide into 40 heads; 5120 is meant; how many positions are learned
it does not say: GPT-3's 2048 are counted); all others their public config.json, of Gemma 3 the text part. Embeddings
and heads count as stored once where they are tied.
"""

from typing import NamedTuple

from evenload.types.architectures.registry import ARCHITECTURES
from evenload.types.model import ModelSpec


class _Row(NamedTuple):
    """0 key/value heads = as many as query heads; 0 head_dim = the width divided by the heads."""

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
