"""Models by name: the shapes of the publications we compare with, and a few open ones.

Sources: `llama-*` SlimPack Table 3 (vocabulary 32,000); `wlb-*` WLB-LLM §7.1: 7B is LLaMA-2-7B, the others are
only said to scale layers and width in proportion, so 550M, 30B and 70B are our reading (sizes agree within 5 %);
`gpt-*` and `bert-*` FlexPipe Table 1 (its width 5140 does not divide into 40 heads; 5120 is meant); `qwen2.5-*`
their public config.json; newer open models are in `types.open_models`.
"""

import difflib
import json
from pathlib import Path

from evenload.errors import ConfigError
from evenload.types.model import ModelSpec, model_from_hf_config
from evenload.types.open_models import OPEN_MODELS


def _llama(
    name: str, layers: int, hidden: int, heads: int, ffn: int, kv_heads: int | None = None, vocab: int = 32_000
) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
    )


def _plain(name: str, layers: int, hidden: int, heads: int, vocab: int, *, causal: bool) -> ModelSpec:
    """GPT-2 or BERT: two feed-forward matrices of four times the width, tied embeddings."""
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=vocab,
        tied_embeddings=True,
        gated_ffn=False,
        causal=causal,
    )


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        _llama("llama-7b", 32, 4096, 32, 11008),
        _llama("llama-13b", 40, 5120, 40, 13824),
        _llama("llama-70b", 80, 8192, 64, 28672, kv_heads=8),
        _llama("llama-150b", 96, 12288, 96, 32768, kv_heads=8),
        _llama("wlb-550m", 16, 1536, 12, 4096),
        _llama("wlb-7b", 32, 4096, 32, 11008),
        _llama("wlb-30b", 60, 6656, 52, 17920),
        _llama("wlb-70b", 80, 8192, 64, 28672, kv_heads=8),
        _plain("gpt-3.35b", 16, 4096, 32, 50_257, causal=True),
        _plain("gpt-13b", 40, 5120, 40, 50_257, causal=True),
        _plain("bert-340m", 24, 1024, 16, 30_522, causal=False),
        _plain("bert-1.36b", 96, 1024, 16, 30_522, causal=False),
        ModelSpec(
            name="qwen2.5-0.5b",
            num_layers=24,
            hidden_size=896,
            num_heads=14,
            num_kv_heads=2,
            head_dim=64,
            ffn_hidden_size=4864,
            vocab_size=151_936,
            tied_embeddings=True,
        ),
        ModelSpec(
            name="qwen2.5-7b",
            num_layers=28,
            hidden_size=3584,
            num_heads=28,
            num_kv_heads=4,
            head_dim=128,
            ffn_hidden_size=18944,
            vocab_size=152_064,
        ),
        *OPEN_MODELS,
    )
}
"""Built-in models by name."""


def model_from(name_or_path: str) -> ModelSpec:
    """A built-in model, or the model of a Hugging Face `config.json` (the file or the folder that holds it).

    Raises:
        ConfigError: neither; the message offers the nearest built-in name.
    """
    if name_or_path in MODELS:
        return MODELS[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        near = difflib.get_close_matches(name_or_path.lower(), MODELS, n=1, cutoff=0.3)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(
            f"model '{name_or_path}' is no built-in name and no config.json; {hint}known: {', '.join(MODELS)}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model {path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model {path} is not a JSON object; give a Hugging Face config.json")
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return model_from_hf_config(config, name)
