"""Which configurations are read, and that what is read is what transformers builds."""

import copy

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from evenload.data.hub import model_from_config
from evenload.errors import ConfigError
from evenload.types.architectures import ARCHITECTURES

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OTHER_SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 4},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
}
_NOT_COUNTED = ("position_embeddings", "token_type", "pooler")
"""Tables of positions and the like, which no layer multiplies with."""


def small_config(kind: str, **more):
    if kind == "gpt2":
        shape = {key: _SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    else:
        shape = dict(_SIZES)
    if kind in ("bert", "roberta", "gpt_neox"):
        del shape["num_key_value_heads"]
    if not ARCHITECTURES[kind].causal:
        shape["pad_token_id"] = 0
    return CONFIG_MAPPING[kind](**{**shape, **_OTHER_SIZES.get(kind, {}), **more})


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_every_known_kind_has_the_weights_that_transformers_builds(kind: str) -> None:
    config = small_config(kind)
    with torch.device("meta"):
        model = (AutoModelForCausalLM if ARCHITECTURES[kind].causal else AutoModel).from_config(config)
    weights = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not any(part in name for part in _NOT_COUNTED)
    )
    spec = model_from_config(config.to_dict(), kind)
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    if spec.biases:
        assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    else:
        assert spec.num_parameters - norms == weights


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_missing_keys_mean_what_transformers_takes_them_for(kind: str) -> None:
    """Ties, and windows where `layer_types` is not written, as in files of older versions."""
    for more in ({}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, {"sliding_window": 7}):
        config = small_config(kind, **more)
        written = config.to_dict()
        expected = [7 if one == "sliding_attention" else 0 for one in getattr(config, "layer_types", None) or ()]
        if config.to_dict().get("sliding_window") == 7 and expected:
            assert list(model_from_config(written, kind).windows) == expected
            written = {key: value for key, value in written.items() if key != "layer_types"}
            assert list(model_from_config(written, kind).windows) == expected
        tied = copy.copy(written)
        del tied["tie_word_embeddings"]
        assert model_from_config(tied, kind).tied_embeddings == CONFIG_MAPPING[kind]().tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen3_next"}, "'qwen3_next'"),
        ({"model_type": "mamba2"}, "'mamba2'"),
        ({"model_type": None}, "names no model_type"),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "q_lora_rank": 1536, "n_routed_experts": 256},
            "model_type 'deepseek_v3', which is not known, and its config.json has latent attention (kv_lora_rank 512, "
            "q_lora_rank 1536); experts of another layout (n_routed_experts 256), so its work and memory cannot be "
            "told; known: bert, gemma,",
        ),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"n_routed_experts": 64}, "n_routed_experts 64"),
        ({"shared_expert_intermediate_size": 512}, "shared experts"),
        ({"first_k_dense_replace": 1}, "some layers dense"),
        ({"num_nextn_predict_layers": 1}, "multi-token prediction"),
        ({"linear_num_value_heads": 32}, "linear attention"),
        ({"mamba_d_state": 128}, "state-space"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types linear_attention"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_be_costed_wrong_is_refused_by_name(changes, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_from_config(small_config("llama").to_dict() | changes, "mine")
    assert "model mine" in str(error.value)
    assert named in str(error.value)


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
    spec = model_from_config(_HUB[kind], kind)
    copies = 1 if spec.tied_embeddings else 2
    embeddings = copies * spec.embedding_parameters
    stored = spec.num_layers * spec.stored_parameters_per_layer + embeddings
    assert stored / 1e9 == pytest.approx(billions, rel=0.01)
    assert (spec.num_layers * spec.linear_parameters_per_layer + embeddings) / 1e9 == pytest.approx(active, rel=0.02)


def test_a_pattern_of_windows_is_read_where_kinds_of_layers_are_missing() -> None:
    config = small_config("gemma3_text", sliding_window=7).to_dict()
    del config["layer_types"]
    spec = model_from_config(config | {"sliding_window_pattern": 3}, "gemma3_text")
    assert spec.windows == (7, 7, 0, 7, 7, 0)
