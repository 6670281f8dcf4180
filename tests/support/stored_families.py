"""Tiny decoders of families whose files differ from what modules hold, and of some whose do not."""

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_COMMON = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_GROUPS = {**_EXPERTS, "n_routed_experts": 12, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_RANKS = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_OWN: dict[str, dict] = {
    "llama": {},
    "gpt2": {"n_positions": 64},
    "mixtral": {"num_local_experts": 11},
    "qwen3_moe": {**_EXPERTS, "num_experts": 11},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention"] * 3},
    "glm4_moe": _GROUPS,
    "deepseek_v3": {**_GROUPS, **_RANKS},
    "minimax_m2": {"num_local_experts": 11, "num_experts_per_tok": 2, "rotary_dim": 8},
    "gemma3_text": {"query_pre_attn_scalar": 20, "sliding_window": 9},
    "olmo3": {},
    "granite": {},
}  # fmt: skip
FAMILIES = tuple(_OWN)


def family_config(family: str, *, tied: bool = False) -> PretrainedConfig:
    return AutoConfig.for_model(family, **_COMMON | _OWN[family], tie_word_embeddings=tied)


def random_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """With a value of its own in every tensor that files hold."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    return model


def units_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """What a stage holds at least, by name in the model: layers, and all else that lies beside them."""
    units: dict[str, nn.Module] = {}
    for name, module in model.base_model.named_children():
        path = f"{model.base_model_prefix}.{name}"
        if isinstance(module, nn.ModuleList):
            units |= {f"{path}.{at}": layer for at, layer in enumerate(module)}
        else:
            units[path] = module
    return units | {"lm_head": model.get_output_embeddings()}


def equal_by_name(result: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """The same tensors by name, type and value."""
    assert result.keys() == expected.keys()
    return all(one.dtype == expected[n].dtype and torch.equal(one, expected[n]) for n, one in result.items())
