"""Make the built-in models, `src/evenload/types/models.json`, from published sizes and transformers' own models.

    python tools/make_models.py [NAME ...]    all, or those named and the others as they are

Every row is a configuration in transformers' keys. What planning reads of it is read from the model that transformers
builds of it on the meta device (`evenload.runtime.model.model_config`). Names and sizes:

    llama-*         SlimPack Table 3 (vocabulary 32,000)
    wlb-*           WLB-LLM §7.1, which gives only 7B (LLaMA-2-7B); others scale layers and width in proportion (30B has
                    64 heads of 104, because 52 of 128 do not divide over tp=8)
    gpt-*, bert-*   FlexPipe Table 1 (its width 5140 means 5120)
    others          their public config.json; of models of text and pictures the text part

BERT's sizes are written as they are: the cost model plans encoders, and trains none.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from transformers import AutoConfig

from evenload.runtime.model.model_config import describe
from evenload.types.model import alike_model

OUT = Path(__file__).resolve().parent.parent / "src" / "evenload" / "types" / "models.json"
_NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


def dense(
    model_type: str,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    **more: Any,
) -> dict[str, Any]:
    """A configuration of the usual keys."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **more,
    }


def gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """GPT-2 with GPT-3's context, without dropout."""
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_inner": 4 * hidden, "n_positions": 2048}
    off = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return {"model_type": "gpt2", "vocab_size": 50_257, **sizes, **off}


def qwen3_moe(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    """128 experts, of which a token uses 8."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": ffn}
    return dense("qwen3_moe", layers, hidden, heads, 4, 128, ffn, _QWEN3, **experts)


def mixtral(layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    """8 experts, of which a token uses 2."""
    return dense(
        "mixtral", layers, hidden, heads, 8, 128, ffn, vocab, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=None,
    )  # fmt: skip


def gemma3(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, window: int
) -> dict[str, Any]:
    """Five layers with a window, and one without."""
    more = {"sliding_window": window, "tie_word_embeddings": True}
    return dense("gemma3_text", layers, hidden, heads, kv_heads, head_dim, ffn, vocab, **more)


def glm4_moe(layers: int, hidden: int, dense_layers: int, ffn: int, inner: int, experts: int) -> dict[str, Any]:
    """GLM-4.5: 96 heads, first layers dense, a shared expert."""
    more = {
        "attention_bias": True,
        "first_k_dense_replace": dense_layers,
        "moe_intermediate_size": inner,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "use_qk_norm": dense_layers > 1,
    }
    return dense("glm4_moe", layers, hidden, 96, 8, 128, ffn, 151_552, **more)


_LLAMA3, _QWEN3, _GEMMA = 128_256, 151_936, 262_144
_TIED = {"tie_word_embeddings": True}
_KIMI = {
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163_840,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
}  # fmt: skip
_MAMBA_AND_ATTENTION = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_BLOCKS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-7b": dense("llama", 32, 4096, 32, 32, 128, 11008, 32_000),
    "llama-13b": dense("llama", 40, 5120, 40, 40, 128, 13824, 32_000),
    "llama-70b": dense("llama", 80, 8192, 64, 8, 128, 28672, 32_000),
    "llama-150b": dense("llama", 96, 12288, 96, 8, 128, 32768, 32_000),
    "wlb-550m": dense("llama", 16, 1536, 12, 12, 128, 4096, 32_000),
    "wlb-7b": dense("llama", 32, 4096, 32, 32, 128, 11008, 32_000),
    "wlb-30b": dense("llama", 60, 6656, 64, 64, 104, 17920, 32_000),
    "wlb-70b": dense("llama", 80, 8192, 64, 8, 128, 28672, 32_000),
    "gpt-3.35b": gpt(16, 4096, 32),
    "gpt-13b": gpt(40, 5120, 40),
    "bert-340m": dense("bert", 24, 1024, 16, 16, 64, 4096, 30_522, **_TIED),
    "bert-1.36b": dense("bert", 96, 1024, 16, 16, 64, 4096, 30_522, **_TIED),
    "qwen2.5-0.5b": dense("qwen2", 24, 896, 14, 2, 64, 4864, 151_936, **_TIED),
    "qwen2.5-7b": dense("qwen2", 28, 3584, 28, 4, 128, 18944, 152_064),
    "llama3-8b": dense("llama", 32, 4096, 32, 8, 128, 14336, _LLAMA3),
    "llama3-70b": dense("llama", 80, 8192, 64, 8, 128, 28672, _LLAMA3),
    "llama3.1-8b": dense("llama", 32, 4096, 32, 8, 128, 14336, _LLAMA3),
    "llama3.1-70b": dense("llama", 80, 8192, 64, 8, 128, 28672, _LLAMA3),
    "llama3.1-405b": dense("llama", 126, 16384, 128, 8, 128, 53248, _LLAMA3),
    "llama3.2-1b": dense("llama", 16, 2048, 32, 8, 64, 8192, _LLAMA3, **_TIED),
    "llama3.2-3b": dense("llama", 28, 3072, 24, 8, 128, 8192, _LLAMA3, **_TIED),
    "qwen3-0.6b": dense("qwen3", 28, 1024, 16, 8, 128, 3072, _QWEN3, **_TIED),
    "qwen3-1.7b": dense("qwen3", 28, 2048, 16, 8, 128, 6144, _QWEN3, **_TIED),
    "qwen3-4b": dense("qwen3", 36, 2560, 32, 8, 128, 9728, _QWEN3, **_TIED),
    "qwen3-8b": dense("qwen3", 36, 4096, 32, 8, 128, 12288, _QWEN3),
    "qwen3-14b": dense("qwen3", 40, 5120, 40, 8, 128, 17408, _QWEN3),
    "qwen3-32b": dense("qwen3", 64, 5120, 64, 8, 128, 25600, _QWEN3),
    "qwen3-30b-a3b": qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": qwen3_moe(94, 4096, 64, 1536),
    "qwen3.5-9b": {"model_type": "qwen3_5_text"},
    "qwen3.5-35b-a3b": {"model_type": "qwen3_5_moe_text"},
    "mixtral-8x7b": mixtral(32, 4096, 32, 14336, 32_000),
    "mixtral-8x22b": mixtral(56, 6144, 48, 16384, 32_768),
    "gemma3-1b": gemma3(26, 1152, 4, 1, 256, 6912, _GEMMA, 512),
    "gemma3-4b": gemma3(34, 2560, 8, 4, 256, 10240, 262_208, 1024),
    "gemma3-12b": gemma3(48, 3840, 16, 8, 256, 15360, 262_208, 1024),
    "gemma3-27b": gemma3(62, 5376, 32, 16, 128, 21504, 262_208, 1024),
    "gemma4-e4b": dense(
        "gemma4_text", 42, 2560, 8, 2, 256, 10240, _GEMMA, global_head_dim=512, num_kv_shared_layers=18, **_TIED
    ),
    "gemma4-31b": dense(
        "gemma4_text", 60, 5376, 32, 16, 256, 21504, _GEMMA, global_head_dim=512, num_global_key_value_heads=4,
        attention_k_eq_v=True, hidden_size_per_layer_input=0, sliding_window=1024, **_TIED,
    ),
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {"model_type": "gpt_oss"},
    "deepseek-v3": {"model_type": "deepseek_v3"},
    "kimi-k2": {"model_type": "deepseek_v3", **_KIMI},
    "glm-4.5": glm4_moe(92, 5120, 3, 12288, 1536, 160),
    "glm-4.5-air": glm4_moe(46, 4096, 1, 10944, 1408, 128),
    "minimax-m2": {"model_type": "minimax_m2"},
    "llama4-scout": {"model_type": "llama4_text"},
    "ministral3-3b": dense("ministral3", 26, 3072, 32, 8, 128, 9216, 131_072, **_TIED),
    "ministral3-8b": dense("ministral3", 34, 4096, 32, 8, 128, 14336, 131_072),
    "ministral3-14b": dense("ministral3", 40, 5120, 32, 8, 128, 16384, 131_072),
    "olmo3-7b": dense("olmo3", 32, 4096, 32, 32, 128, 11008, 100_278),
    "olmo3-32b": dense("olmo3", 64, 5120, 40, 8, 128, 27648, 100_278),
    "nemotron-h-8b": {
        "model_type": "nemotron_h", "layers_block_type": [_BLOCKS[block] for block in _MAMBA_AND_ATTENTION]
    },
}  # fmt: skip

# Longest documents of the published configurations (max_position_embeddings); papers' models have none.
_128K, _256K = 131_072, 262_144
_POSITIONS = {
    "qwen2.5-": 32_768, "llama3-": 8_192, "llama3.": _128K, "qwen3-": 40_960, "qwen3.5-": _256K,
    "mixtral-8x7b": 32_768, "mixtral-8x22b": 65_536, "gemma3-1b": 32_768, "gemma3-4b": _128K, "gemma3-12b": _128K,
    "gemma3-27b": _128K, "gemma4-e4b": _128K, "gemma4-31b": _256K, "gpt-oss-": _128K, "deepseek-v3": 163_840,
    "kimi-k2": _128K, "glm-4.5": _128K, "minimax-m2": 196_608, "llama4-scout": 10_485_760, "ministral3-": _256K,
    "olmo3-": 65_536, "nemotron-h-": 8_192,
}  # fmt: skip
for _name, _configuration in CONFIGURATIONS.items():
    for _start, _positions in _POSITIONS.items():
        if _name.startswith(_start):
            _configuration["max_position_embeddings"] = _positions


def entry(name: str, configuration: dict[str, Any]) -> dict[str, Any]:
    """A built-in model."""
    configuration = _NO_TOKENS | configuration
    if configuration["model_type"] == "bert":
        model = alike_model(
            name=name,
            num_layers=configuration["num_hidden_layers"],
            hidden_size=configuration["hidden_size"],
            num_heads=configuration["num_attention_heads"],
            num_kv_heads=configuration["num_key_value_heads"],
            head_dim=configuration["head_dim"],
            ffn_hidden_size=configuration["intermediate_size"],
            vocab_size=configuration["vocab_size"],
            tied_embeddings=True,
            gated_ffn=False,
            causal=False,
        )
    else:
        model = describe(AutoConfig.for_model(**configuration), name)
    tree = msgspec.to_builtins(model)
    defaults = {field.name: field.default for field in msgspec.structs.fields(model)}
    return {"config": configuration, "model": {key: one for key, one in tree.items() if one != defaults[key]}}


def main() -> None:
    """Write the file, a model a line."""
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    wanted = sys.argv[1:]
    lines = []
    for name, configuration in CONFIGURATIONS.items():
        made = known[name] if wanted and name not in wanted and name in known else entry(name, configuration)
        lines.append(f"{json.dumps(name)}: {json.dumps(made, separators=(',', ':'))}")
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
