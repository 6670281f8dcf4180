"""Open models by name: Llama 3, Qwen 3, Mixtral and Gemma 3 (its text part), from their public config.json.

Embeddings and heads count as stored once where they are tied. Sliding windows of Gemma 3 are 512 tokens in the smallest
and 1,024 in the others; every sixth layer sees everything.
"""

from typing import NamedTuple

from evenload.types.model import ModelSpec


class _Row(NamedTuple):
    name: str
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


_LLAMA3, _QWEN3 = 128_256, 151_936
_ROWS = (
    _Row("llama3-8b", 32, 4096, 32, 8, 128, 14336, _LLAMA3),
    _Row("llama3-70b", 80, 8192, 64, 8, 128, 28672, _LLAMA3),
    _Row("llama3.1-405b", 126, 16384, 128, 8, 128, 53248, _LLAMA3),
    _Row("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, _LLAMA3, tied=True),
    _Row("llama3.2-3b", 28, 3072, 24, 8, 128, 8192, _LLAMA3, tied=True),
    _Row("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, _QWEN3, tied=True),
    _Row("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, _QWEN3, tied=True),
    _Row("qwen3-4b", 36, 2560, 32, 8, 128, 9728, _QWEN3, tied=True),
    _Row("qwen3-8b", 36, 4096, 32, 8, 128, 12288, _QWEN3),
    _Row("qwen3-14b", 40, 5120, 40, 8, 128, 17408, _QWEN3),
    _Row("qwen3-32b", 64, 5120, 64, 8, 128, 25600, _QWEN3),
    _Row("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, _QWEN3, experts=128, chosen=8),
    _Row("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, _QWEN3, experts=128, chosen=8),
    _Row("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32_000, experts=8, chosen=2),
    _Row("mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32_768, experts=8, chosen=2),
    _Row("gemma3-1b", 26, 1152, 4, 1, 256, 6912, 262_144, tied=True, window=512),
    _Row("gemma3-4b", 34, 2560, 8, 4, 256, 10240, 262_208, tied=True, window=1024),
    _Row("gemma3-12b", 48, 3840, 16, 8, 256, 15360, 262_208, tied=True, window=1024),
    _Row("gemma3-27b", 62, 5376, 32, 16, 128, 21504, 262_208, tied=True, window=1024),
)
_FULL_EVERY = 6


def _spec(row: _Row) -> ModelSpec:
    windows = tuple(0 if index % _FULL_EVERY == 0 else row.window for index in range(1, row.layers + 1))
    return ModelSpec(
        name=row.name,
        num_layers=row.layers,
        hidden_size=row.hidden,
        num_heads=row.heads,
        num_kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        ffn_hidden_size=row.ffn,
        vocab_size=row.vocab,
        tied_embeddings=row.tied,
        num_experts=row.experts,
        experts_per_token=row.chosen,
        sliding_windows=windows if row.window else (),
        post_norm=row.name.startswith("gemma3"),
    )


OPEN_MODELS = tuple(_spec(row) for row in _ROWS)
"""Open models, by family and size."""
