"""Reading Hugging Face configurations of every architecture that is trained, also as they lie on the Hub."""

import pytest

from evenload.types.model import model_from_hf_config
from reference_training import KINDS, tiny_config

# What config.json on the Hub leaves out because it is the default, or says by an older name.
_HUB = {
    "gemma": {
        "model_type": "gemma", "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
        "num_hidden_layers": 18, "intermediate_size": 16384, "vocab_size": 256000,
    },
    "gemma2": {
        "model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "num_hidden_layers": 26, "intermediate_size": 9216, "vocab_size": 256000,
        "sliding_window": 4096, "sliding_window_size": 4096,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "num_hidden_layers": 26, "intermediate_size": 6912, "vocab_size": 262144,
        "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "olmo2": {
        "model_type": "olmo2", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "intermediate_size": 11008, "vocab_size": 100352, "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 48, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8, "sliding_window": None,
        "use_sliding_window": False, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "billions", "active"),
    [("gemma", 2.51, 2.51), ("gemma2", 2.61, 2.61), ("gemma3_text", 1.0, 1.0), ("olmo2", 7.30, 7.30),
     ("mixtral", 46.7, 12.9), ("qwen3_moe", 30.5, 3.35)],
)  # fmt: skip
def test_models_of_the_hub_have_their_published_size(kind: str, billions: float, active: float) -> None:
    spec = model_from_hf_config(_HUB[kind], kind)
    copies = 1 if spec.tied_embeddings else 2
    embeddings = copies * spec.embedding_parameters
    stored = spec.num_layers * spec.stored_parameters_per_layer + embeddings
    assert stored / 1e9 == pytest.approx(billions, rel=0.01)
    assert (spec.num_layers * spec.linear_parameters_per_layer + embeddings) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_ties_are_those_that_transformers_applies(kind: str) -> None:
    """With every key present, and with those missing that a config.json may leave out."""
    config = tiny_config(kind, tied=kind.startswith("gemma"))
    whole = config.to_dict()
    spec = model_from_hf_config(whole, kind)
    expected = [
        config.sliding_window if kind == "sliding_attention" else 0
        for kind in getattr(config, "layer_types", None) or ["full_attention"] * 4
    ]
    assert list(spec.windows) == expected
    if kind.startswith("gemma"):
        missing = {key: value for key, value in whole.items() if key not in ("layer_types", "tie_word_embeddings")}
        missing["sliding_window_pattern"] = 3
        assert model_from_hf_config(missing, kind) == spec
