"""Plain training with transformers' own sdpa attention, document by document: what everything must equal."""

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

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


def tiny_config(kind: str, *, tied: bool = False, **changes) -> PretrainedConfig:
    """A decoder of 4 small layers: llama (GQA), qwen2 (bias), qwen3 (qk-norm) or mistral."""
    settings = {**_COMMON, "tie_word_embeddings": tied, **changes}
    if kind == "llama":
        return LlamaConfig(**settings)
    if kind == "qwen2":
        return Qwen2Config(**settings)
    if kind == "qwen3":
        return Qwen3Config(**{"head_dim": 16, **settings})
    if kind == "mistral":
        return MistralConfig(**{"sliding_window": None, **settings})
    raise ValueError(kind)


def make_tokens(lengths: list[int], vocab_size: int, seed: int = 0) -> dict[int, torch.Tensor]:
    """Random tokens per document id; int64[length] each."""
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randint(0, vocab_size, (n,), generator=generator) for i, n in enumerate(lengths)}


def plain_loss_and_gradients(
    config: PretrainedConfig,
    weights: dict[str, torch.Tensor],
    tokens: dict[int, torch.Tensor],
    dtype: torch.dtype,
    num_labels: int | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean next-token loss over the batch's labels (or `num_labels`) and the gradient of every parameter."""
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    num_labels = num_labels or max(1, sum(len(t) - 1 for t in tokens.values()))
    total = torch.zeros((), dtype=dtype)
    for document in tokens.values():
        logits = model(document[None]).logits[0, :-1]
        total = total + nn.functional.cross_entropy(logits, document[1:], reduction="sum") / num_labels
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference; absolute where the true gradient is zero
    (for example of q and k when a row sees one key, which rounding leaves at 1e-17)."""
    norm = theirs.double().norm().item()
    difference = (ours.double() - theirs.double()).norm().item()
    return difference / norm if norm > 1e-12 else difference
