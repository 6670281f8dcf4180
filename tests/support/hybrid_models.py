"""Tiny models of the ten families of transformers whose layers carry states."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
    "tie_word_embeddings": False, "num_hidden_layers": 2,
}  # fmt: skip
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_TURNS = ["linear_attention", "full_attention"]
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
FAMILIES = {
    "qwen3_next": {**_DELTA, "head_dim": 8, "layer_types": _TURNS, "mlp_only_layers": [0, 1]},
    "qwen3_5_text": {**_DELTA, "head_dim": 8, "layer_types": _TURNS},
    "olmo_hybrid": {**_DELTA, "linear_num_value_heads": 2, "layer_types": _TURNS},
    "kimi_linear": {
        "layer_types": ["linear_attention"] * 2, "mlp_layer_types": ["dense"] * 2, "linear_num_heads": 2,
        "linear_head_dim": 8,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 8, "chunk_size": 16, "head_dim": 8,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 99, "expert_layer_offset": 98,
        "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 8},
}  # fmt: skip


def hybrid_model(kind, **changes):
    """Two layers, of recurrence and of attention, with weights at which every part counts."""
    sizes = {key: value for key, value in _SIZES.items() if kind != "nemotron_h" or key != "num_hidden_layers"}
    torch.manual_seed(1)
    config = CONFIG_MAPPING[kind](**(sizes | FAMILIES.get(kind, {}) | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 or "conv" in name:
                weight += 0.3 * torch.randn_like(weight)
    return model
