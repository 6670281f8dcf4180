"""Tiny models of every causal type of transformers, with random weights, and their plain training in exact float64."""

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from evenload.runtime.model.narrow import narrow_values

CAUSAL_TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
_LAYERS = 4
_COUNTS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
    "num_blocks",
)  # fmt: skip
_FEW = {
    "first_k_dense_replace": 1, "num_dense_layers": 1, "moe_layer_start_index": 1, "moe_layer_end_index": _LAYERS - 1,
    "num_nextn_predict_layers": 0, "num_kv_shared_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
    "no_rope_layer_interval": 2, "max_window_layers": 2, "n_positions": 512, "max_position_embeddings": 512,
}  # fmt: skip
"""Of layers: where kinds begin and end among four of them."""
_VARIED = (
    "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "attn_layer_period", "no_rope_layers",
    "num_kv_shared_layers", "max_window_layers", "global_attn_every_n_layers", "_sliding_window_pattern",
    "layer_types", "mlp_layer_types", "layers_block_type", "block_types", "hybrid_layer_ids", "layer_group_size",
    "cross_attention_layers", "attn_layer_indices",
)  # fmt: skip
"""With any of these, layers may differ."""
_LISTS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
_OFF = ("dropout", "pdrop", "layerdrop", "jitter", "dropout_p")

# What defaults leave open, or what fits a few layers only.
_OWN: dict[str, dict] = {
    "dots3_note_text": {"num_key_value_heads": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "qwen4_exp_text": {
        "ple_layer_ids": [1], "eos_token_id": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
                "num_layers": 2},
    "reformer": {"axial_pos_embds_dim": [16, 48]},
    "ministral": {"sliding_window": 9},
    "deepseek_v2": {"topk_method": "greedy", "n_routed_experts": 6, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
        "max_seq_len": 512,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "deepseek_v4": {"hc_mult": 2, "hc_sinkhorn_iters": 2},
    "falcon_h1": {"mamba_expand": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "zamba2": {"hybrid_layer_ids": [1, 3]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "gemma3n_text": {"intermediate_size": [80] * 4, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0]},
    "llama4_text": {
        "no_rope_layers": [1, 0, 1, 0], "moe_layers": [1, 3],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
    },
}  # fmt: skip


def tiny_causal_config(model_type: str, **changes) -> PretrainedConfig:
    """A few small layers of every kind that the type's default configuration has."""
    whole = CONFIG_MAPPING[model_type]()
    text = whole.get_text_config(decoder=True)
    is_wrapped = type(text) is not type(whole) and type(text) in AutoModelForCausalLM._model_mapping
    default = text if is_wrapped else whole
    values = default.to_dict()
    # Only what changes is given, so that all that follows from it is made anew.
    few = {key: value for key, value in narrow_values(values).items() if value != values[key]}
    few.pop("per_layer_config", None)
    own = _OWN.get(default.model_type, {}) | _OWN.get(model_type, {})
    kinds = {key: list(dict.fromkeys(values[key])) for key in _LISTS if isinstance(values.get(key), list)}
    layers = _LAYERS if any(values.get(key) for key in _VARIED) or own else 2
    layers = max(layers, *map(len, kinds.values()), 0)
    for key, seen in kinds.items():
        # Kinds of attention take turns; dense layers are first.
        at = [min(i, len(seen) - 1) if key == "mlp_layer_types" else i % len(seen) for i in range(layers)]
        few[key] = [seen[i] for i in at] if seen else []
    few |= {key: layers for key in _COUNTS if key in values}
    few |= {key: _FEW[key] for key, value in values.items() if key in _FEW and isinstance(value, int)}
    few |= {key: value for key, value in _without_dropout(values | few).items() if value != (values | few)[key]}
    for key, value in (("is_decoder", True), ("add_cross_attention", False), ("output_router_logits", False)):
        if key in values:
            few[key] = value
    if "head_dim" in values and values["head_dim"] is None:
        few["head_dim"] = 16
    config = type(default)(**(few | own | changes))
    if layers_of_their_own := config.to_dict().get("per_layer_config"):
        few["per_layer_config"] = narrow_values(layers_of_their_own)
        config = type(default)(**(few | own | changes))
    return config


def _without_dropout(values: dict) -> dict:
    return {
        key: _without_dropout(value)
        if isinstance(value, dict)
        else 0.0
        if isinstance(value, float) and any(one in str(key) for one in _OFF)
        else value
        for key, value in values.items()
    }


def plain_training(model: PreTrainedModel, tokens: dict[int, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by transformers' own model, document by document; zeros where there is no gradient."""
    model.zero_grad()
    labels, total = sum(len(ids) - 1 for ids in tokens.values()), 0.0
    for ids in tokens.values():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        loss = nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum") / labels
        loss.backward()
        total += loss.item()
    return total, {
        name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in model.named_parameters()
    }
