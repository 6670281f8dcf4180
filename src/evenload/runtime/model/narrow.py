"""Make narrowed copies of models: of few heads, channels, experts and words, in float64, whose layers compute as the
model's own do. `narrowed` gives the configuration, `build_narrow` a model with weights."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from evenload.runtime.model.around import configs_of

_BY_WIDTH: dict[int, str] = {
    97: "vocab_size vocab_size_per_layer_input unpadded_vocab_size encoder_hash_byte_group_vocab",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim emb_dim lru_width embedding_dim",
    80: "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dff dim_ff "
    "intermediate_size_mlp dense_intermediate_size d_inner feed_forward_size shared_intermediate_size "
    "expert_ffn_hidden_size",
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_experts_intermediate_size q_lora_rank",
    4: "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads "
    "num_decoder_attention_heads attention_heads num_heads swa_num_attention_heads linear_num_heads "
    "linear_num_value_heads mamba_dt_rank time_step_rank index_block_size compress_rates adapter_rank d_rel",
    2: "num_key_value_heads num_kv_heads kv_n_heads num_query_groups swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_k moe_topk top_k_experts moe_top_k n_group linear_num_key_heads "
    "num_expert_group n_groups mamba_expand expand index_n_heads index_topk_blocks o_groups zero_expert_num "
    "indexer_n_heads hc_count heads_per_ngram indexer_compress_ratio split_ngram_parts "
    "make_ngram_vocab_size_divisible_by",
    16: "head_dim swa_head_dim dim_head kv_channels kv_lora_rank "
    "linear_head_dim mamba_d_head mamba_head_dim mamba_headdim mamba_chunk_size chunk_size index_head_dim "
    "router_hidden_size attention_head_size indexer_head_dim ple_embed_dim",
    6: "num_experts n_routed_experts num_local_experts moe_num_experts index_topk",
    9: "sliding_window sliding_window_size window_size attention_window_size local_attention",
    8: "attention_chunk_size qk_rope_head_dim hidden_size_per_layer_input laurel_rank rotary_dim "
    "linear_key_head_dim linear_value_head_dim mamba_d_state mamba_n_heads n_mamba_heads mamba_num_heads "
    "ssm_state_size state_size rel_extent floor_scale log_scaling_n_floor indexer_budget hc_lowrank",
    12: "qk_nope_head_dim o_lora_rank",
    14: "v_head_dim",
    20: "qk_head_dim",
    1: "topk_group n_shared_experts num_shared_experts moe_num_shared_experts mamba_n_groups mamba_ngroups "
    "index_local_blocks encoder_layers num_encoder_layers indexer_kv_heads",
    128: "mamba_d_ssm attention_hidden_size",
    32: "attention_head_dim",
    50: "ngram_vocab_size_base",
}  # fmt: skip
WIDTHS = {name: size for size, names in _BY_WIDTH.items() for name in names.split()}
"""Sizes by key. Layers keep their number, and every key that decides what a layer does keeps its value."""
_HEADS, _KV_HEADS = ("num_attention_heads", "n_head", "n_heads"), ("num_key_value_heads", "num_kv_heads")
# Weights of state spaces whose own initial values keep states finite.
_TIME_SCALES = {"A_log", "dt_bias", "D", "A", "time_decay", "time_first", "lambda_param", "recurrent_param"}


def narrowed(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of few heads, channels, experts and words."""
    text = config.get_text_config(decoder=True)
    is_wrapped = type(text) is not type(config) and type(text) in AutoModelForCausalLM._model_mapping
    chosen = text if is_wrapped else config
    values = chosen.to_dict()
    return type(chosen).from_dict(values | narrow_values(values))


def narrow_values(values: dict[str, Any], outer: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the keys of a configuration that are narrowed; `outer` = of the one that it is a part of."""
    rope = json.dumps(values.get("rope_parameters") or values.get("rope_scaling") or {})
    # Lists of factors have as many entries as a head has frequencies.
    kept = {"head_dim", "rotary_dim"} if "[" in rope else set[str]()
    found: dict[str, Any] = {"quantization_config": None} if values.get("quantization_config") else {}
    known = {**outer, **values}
    nope, rotary = known.get("qk_nope_head_dim") or 0, known.get("qk_rope_head_dim") or 0
    heads = next((known[key] for key in _HEADS if known.get(key)), None)
    for key, value in values.items():
        if nope and key in ("head_dim", "swa_head_dim", "qk_head_dim") and value in (rotary, nope + rotary):
            found[key] = WIDTHS["qk_rope_head_dim" if value == rotary else "qk_head_dim"]
        elif key in WIDTHS and key not in kept:
            is_all = key in _KV_HEADS and heads is not None and value == heads
            found[key] = _narrow_value(value, 4 if is_all else WIDTHS[key])
        elif isinstance(value, dict):
            found[key] = value | narrow_values(value, known)
        elif key == "use_cache":
            found[key] = False
        elif str(key).endswith("_token_id") and value is not None:
            found[key] = 1
    if "expand" in values and "num_heads" in values:  # of a state space, whose heads share its channels
        found["num_heads"] = found["expand"] * found["hidden_size"] // found["head_dim"]
    if kept and heads and not values.get("head_dim"):
        found["hidden_size"] = found["num_attention_heads"] * (values["hidden_size"] // heads)
    return found


def _narrow_value(value: Any, size: int) -> Any:
    """Replace sizes; 0, 1 and 2 say whether there is something, or how many a token has."""
    if isinstance(value, list | tuple):
        return [_narrow_value(one, size) for one in value]
    if isinstance(value, dict):
        return {key: _narrow_value(one, size) for key, one in value.items()}
    return size if isinstance(value, int) and not isinstance(value, bool) and value > 2 else value


def build_narrow(config: PretrainedConfig) -> PreTrainedModel:
    """Make a small model in float64 in training mode, whose weights are of a size at which every part counts."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").double()
    for own in configs_of(model):
        own._experts_implementation_internal = "eager"  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            if "correction_bias" in name or "expert_bias" in name:
                weight.copy_(noise * 0.05)
            elif not isinstance(weight, nn.Parameter) or name.rpartition(".")[2] in _TIME_SCALES:
                continue
            elif weight.ndim >= 2:
                weight.copy_(noise * (1.0 if "embed" in name or "wte" in name else 1.2 / weight.shape[-1] ** 0.5))
            else:
                weight.add_(noise * 0.1)
    return model.train()


_QUOTIENTS = (Tensor.div, Tensor.true_divide, torch.div, torch.true_divide)
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS = (Tensor.matmul, Tensor.__matmul__, Tensor.bmm, torch.matmul, torch.bmm)


class Float64Casts(TorchFunctionMode):
    """Makes casts to float32, by whatever function, casts to float64, except of what is narrower already, and so of
    quotients of integers. Products of both widths (rotary embedding of transformers before 5.18) are in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_floating = any(isinstance(value, Tensor) and value.is_floating_point() for value in args)
        if func in _QUOTIENTS and not kwargs.get("rounding_mode") and not is_floating:
            return func(args[0].double(), *args[1:], **kwargs)
        is_cast = func is Tensor.float or any(value is torch.float32 for value in (*args, *kwargs.values()))
        if is_cast and getattr(next(iter(args), None), "dtype", None) not in _NARROW:
            func = Tensor.double if func is Tensor.float else func
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
        if func in _PRODUCTS and any(one.dtype is torch.float64 for one in args):
            args = [one.double() for one in args]
        return func(*args, **kwargs)
