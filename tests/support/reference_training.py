"""Plain training with transformers' own attention, document by document: what everything must equal.

Plain training and ours both run under `evenload.check.smaller_run` (tests/conftest.py), so that in float64 nothing but
float64's own rounding is left.
"""

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from evenload.runtime.model.hf_model import StageModel, build_stage_model, empty_model
from evenload.runtime.model.structure import Structure, structure_of

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}


_HEADS_OF_16 = {"head_dim": 16}
_GEMMA = {**_HEADS_OF_16, "query_pre_attn_scalar": 20, "sliding_window": 9}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
# A dense first layer, then experts beside a shared one, chosen by groups.
_SHARED = {"moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
           "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
_CHOSEN = {"num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14,
           "num_key_value_heads": 4}  # fmt: skip
_GEMMA4 = {"head_dim": 16, "global_head_dim": 24, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
_OWN: dict[str, tuple[type[PretrainedConfig], dict]] = {
    "llama": (LlamaConfig, {}),
    "gpt2": (GPT2Config, {"n_positions": 512, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, _HEADS_OF_16),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "gemma": (GemmaConfig, _HEADS_OF_16),
    "gemma2": (Gemma2Config, {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": (Gemma3TextConfig, {**_GEMMA, "sliding_window_pattern": 3}),
    "olmo2": (Olmo2Config, {}),
    "mixtral": (MixtralConfig, {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (Qwen3MoeConfig, {**_HEADS_OF_16, **_EXPERTS}),
    "gpt_oss": (
        GptOssConfig,
        {**_HEADS_OF_16, "intermediate_size": 24, "num_local_experts": 6, "sliding_window": 9, **_CHOSEN},
    ),
    "glm4_moe": (Glm4MoeConfig, {**_HEADS_OF_16, **_SHARED}),
    "deepseek_v3": (DeepseekV3Config, {**_SHARED, **_LATENT}),
    "minimax_m2": (MiniMaxM2Config, {**_HEADS_OF_16, "intermediate_size": 24, "num_local_experts": 6, **_CHOSEN}),
    "gemma4": (Gemma4TextConfig, {**_GEMMA4, "sliding_window": 9, "num_kv_shared_layers": 0}),
    "ministral3": (Ministral3Config, _HEADS_OF_16),
    "olmo3": (Olmo3Config, {"sliding_window": 9}),
    "smollm3": (SmolLM3Config, {}),
    "granite": (GraniteConfig, {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 16}
_LINEAR = ("layer_types", "linear_attention", "full_attention")
# The key that lists their layers with the names of both kinds, and sizes of their own.
_RECURRENT: dict[str, tuple[tuple[str, str, str] | None, dict]] = {
    "qwen3_next": (_LINEAR, {**_DELTA, **_HEADS_OF_16, **_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3_5_text": (_LINEAR, {**_DELTA, **_HEADS_OF_16}),
    "olmo_hybrid": (_LINEAR, {**_DELTA, "linear_num_value_heads": 2}),
    "kimi_linear": (
        _LINEAR, {**_LATENT, "linear_num_heads": 2, "linear_head_dim": 8, "mlp_layer_types": ["dense"] * 4},
    ),
    "bamba": (None, {**_MAMBA, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        ("layer_types", "mamba", "attention"),
        {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 48, "residual_multiplier": 0.7},
    ),
    "nemotron_h": (
        ("layers_block_type", "mamba", "attention"),
        {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 16,
         "head_dim": 8},
    ),
    "falcon_h1": (None, {**_MAMBA, "ssm_multipliers": [0.25, 1.5, 0.75, 2.0, 0.5], "mamba_d_ssm": 96, "head_dim": 12}),
    "jamba": (
        None,
        {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 4,
         "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "lfm2": (("layer_types", "conv", "full_attention"), {"conv_L_cache": 4, "block_multiple_of": 8}),
    "mamba2": (None, {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 8, "chunk_size": 16, "expand": 2}),
}  # fmt: skip
RECURRENT_KINDS = tuple(_RECURRENT)
"""Gated DeltaNet thrice (with experts; norms first; norms last), KDA beside latent attention, Mamba-2 thrice, beside
attention in every layer, Mamba-1 and experts, short convolutions, Mamba-2 alone."""
KINDS = tuple(_OWN)
"""GQA; learned positions, biases everywhere, one matrix for q, k and v; bias; qk-norm; window; embedding factor; capped
scores and logits, post-norms, windows by turns; rotary by kind of layer, qk-norm; post-norm only; experts; experts and
qk-norm; sinks, biases of experts; a dense first layer and shared experts; latent attention; experts of all layers with
norms of all heads; heads of two widths and embeddings a layer; scaled queries; windows and post-norms; layers without
positions; multipliers."""


def tiny_config(kind: str, *, tied: bool = False, **changes) -> PretrainedConfig:
    """A decoder of 4 small layers of a kind in `KINDS` or `RECURRENT_KINDS`, whose second layer attends."""
    if kind in _RECURRENT:
        return _recurrent_config(kind, tied=tied, **changes)
    config_class, own = _OWN[kind]
    settings = {**_COMMON, "tie_word_embeddings": tied, **own, **changes}
    if kind == "gpt2":
        names = {**GPT2Config.attribute_map, "intermediate_size": "n_inner"}
        settings = {names.get(key, key): value for key, value in settings.items() if key != "num_key_value_heads"}
    return config_class(**settings)


def _recurrent_config(kind: str, *, tied: bool, **changes) -> PretrainedConfig:
    listed, own = _RECURRENT[kind]
    settings = {**_COMMON, "tie_word_embeddings": tied, **own, **changes}
    layers = settings["num_hidden_layers"]
    if listed is not None:
        key, recurrent, attention = listed
        settings.setdefault(key, [attention if at % 4 == 1 else recurrent for at in range(layers)])
    if "mlp_layer_types" in settings:
        settings["mlp_layer_types"] = settings["mlp_layer_types"][:layers]
    if kind == "nemotron_h":
        del settings["num_hidden_layers"]
    return AutoConfig.for_model(kind, **settings)


def structure(config: PretrainedConfig) -> Structure:
    """Of transformers' model of a configuration."""
    return structure_of(empty_model(config))


def embedding_name(config: PretrainedConfig) -> str:
    """Of the embedding's weight in the whole model."""
    return f"{structure(config).embedding}.weight"


def balance_factor(config: PretrainedConfig) -> float:
    """Of the load-balancing loss, as transformers would train the model."""
    return config.router_aux_loss_coef if getattr(config, "output_router_logits", False) else 0.0


def plain_model(config: PretrainedConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> nn.Module:
    """transformers' model with these weights."""
    # Which neither caps scores nor has sinks.
    has_sdpa = config.model_type != "gemma2" and AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa
    config._attn_implementation = "sdpa" if has_sdpa else "eager"
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for weight in model.parameters():
        weight.data = weight.to(dtype)  # some are made in float32 whatever the precision
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight", *(name for name, _ in model.named_buffers())}
    return model


def make_tokens(lengths: list[int], vocab_size: int, seed: int = 0) -> dict[int, torch.Tensor]:
    """Random tokens per document id; int64[length] each."""
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randint(0, vocab_size, (n,), generator=generator) for i, n in enumerate(lengths)}


def stage_model(config, dtype=torch.float64, *, layers=None, device="cpu", weights=None, seed=3, **more) -> StageModel:
    """Of some layers, default all, with random weights or those of a directory."""
    given = {"layers": layers or (0, config.num_hidden_layers), "device": torch.device(device)}
    return build_stage_model(config, **given, dtype=dtype, weights=weights, seed=seed, **more)


def plain_loss_and_gradients(
    config: PretrainedConfig,
    weights: dict[str, torch.Tensor],
    tokens: dict[int, torch.Tensor],
    dtype: torch.dtype,
    num_labels: int | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean next-token loss over the batch's labels (or `num_labels`), plus the load-balancing loss of every document
    where the configuration asks for it, and the gradient of every parameter."""
    model, factor = plain_model(config, weights, dtype), balance_factor(config)
    num_labels = num_labels or max(1, sum(len(t) - 1 for t in tokens.values()))
    total = torch.zeros((), dtype=dtype)
    num_tokens = sum(len(t) for t in tokens.values())
    for document in tokens.values():
        out = model(document[None])
        loss = nn.functional.cross_entropy(out.logits[0, :-1], document[1:], reduction="sum")
        total = total + loss / num_labels
        if factor:
            total = total + factor * len(document) / num_tokens * document_balance(config, out.router_logits)
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


def plain_error(
    config: PretrainedConfig, weights: dict[str, torch.Tensor], tokens: dict[int, torch.Tensor], dtype: torch.dtype
) -> float:
    """What a precision alone costs, on this processor: the largest relative error of a parameter's gradient of plain
    training in it, against float64. Ours sums in another order, so it may be off from plain training by twice this."""
    _, result = plain_loss_and_gradients(config, weights, tokens, dtype)
    exact_weights = {name: weight.double() for name, weight in weights.items()}
    _, exact = plain_loss_and_gradients(config, exact_weights, tokens, torch.float64)
    return max(relative_error(result[name], gradient) for name, gradient in exact.items())


@torch.no_grad()
def plain_document_losses(
    config: PretrainedConfig, weights: dict[str, torch.Tensor], tokens: dict[int, torch.Tensor], dtype: torch.dtype
) -> dict[int, float]:
    """The sum of the next-token losses of every document."""
    model = plain_model(config, weights, dtype)
    return {
        doc_id: nn.functional.cross_entropy(model(document[None]).logits[0, :-1], document[1:], reduction="sum").item()
        for doc_id, document in tokens.items()
    }


def document_balance(config: PretrainedConfig, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The load-balancing loss of one document by its definition (docs/decisions/15): the mean over layers of
    E · Σ_e (share of tokens that chose e) · (mean probability of e)."""
    per_layer = []
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        chosen = torch.topk(probabilities, config.num_experts_per_tok, dim=-1).indices
        share = nn.functional.one_hot(chosen, logits.shape[1]).sum(1).to(logits.dtype).mean(0)
        per_layer.append(logits.shape[1] * (share * probabilities.mean(0)).sum())
    return torch.stack(per_layer).mean()


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over that of the reference; absolute where the true gradient is zero."""
    norm = theirs.double().norm().item()
    difference = (ours.double() - theirs.double()).norm().item()
    return difference / norm if norm > 1e-12 else difference
