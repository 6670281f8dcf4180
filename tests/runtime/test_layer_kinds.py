"""What planning reads of a decoder is what transformers builds, and is known without torch from then on."""

import json
from types import SimpleNamespace

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from evenload.calibrate.kernels import activation_bytes
from evenload.data import hub
from evenload.data.hub import model_from, model_from_config
from evenload.errors import ConfigError
from evenload.runtime.model.model_config import describe
from evenload.types.layer_kind import AttentionKind, StateKind
from evenload.types.model import CONFIGURATIONS, MODELS, alike_model
from single_stage import stage_of
from transformers_version import of_newest

_READ = [name for name, config in CONFIGURATIONS.items() if config["model_type"] != "bert"]
_SMALL = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 97, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_local_experts": 6}
_GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}


def small(kind: str, **more):
    return AutoConfig.for_model(kind, **(_SMALL | more))


@pytest.mark.parametrize("name", _READ)
def test_a_built_in_model_has_the_weights_that_transformers_builds(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGURATIONS[name]), dtype=torch.bfloat16)
    assert MODELS[name].num_parameters == sum(one.numel() for one in model.parameters())
    assert MODELS[name].num_layers == model.config.num_hidden_layers


@pytest.mark.parametrize(
    "name",
    [
        *("llama3.2-1b", "qwen3-0.6b", "gemma3-1b", "gpt-oss-20b", "mixtral-8x7b"),
        pytest.param("nemotron-h-8b", marks=of_newest),  # is read with a layer less by older ones
    ],
)
def test_a_built_in_model_is_what_its_configuration_says(name: str) -> None:
    assert model_from_config(CONFIGURATIONS[name], name) == MODELS[name]


@pytest.mark.parametrize(
    ("kind", "more", "attention", "count"),
    [
        ("qwen2", {}, AttentionKind(heads=4, kv_heads=2, head_dim=16, value_dim=16), 1),
        ("gemma2", {"head_dim": 16, "sliding_window": 7},
         AttentionKind(heads=4, kv_heads=2, head_dim=16, value_dim=16, window=7, soft_cap=50.0), 2),
        ("gpt_oss", {"head_dim": 16, "sliding_window": 9, **_EXPERTS},
         AttentionKind(heads=4, kv_heads=2, head_dim=16, value_dim=16, window=9, sinks=True), 2),
        ("deepseek_v3", {**_GLM, **_LATENT, "n_group": 2, "topk_group": 1},
         AttentionKind(heads=4, kv_heads=4, head_dim=12, value_dim=6), 2),
        ("olmo3", {"sliding_window": 5}, AttentionKind(heads=4, kv_heads=2, head_dim=16, value_dim=16, window=5), 2),
        ("llama4_text", {"head_dim": 16, "attention_chunk_size": 8, "attn_temperature_tuning": False,
                         "intermediate_size_mlp": 160, "num_local_experts": 4},
         AttentionKind(heads=4, kv_heads=2, head_dim=16, value_dim=16, chunk=8), 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_attention_is_read_as_it_enters_the_scores(kind: str, more, attention: AttentionKind, count: int) -> None:
    model = describe(small(kind, **more), kind)
    assert attention in model.attentions
    assert len(model.kinds) == count
    assert not model.mixers


@pytest.mark.parametrize(
    ("kind", "more", "mixer"),
    [
        ("minimax", {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"] * 3, **_EXPERTS},
         "MiniMaxLightningAttention"),
        ("llama4_text", {"head_dim": 16, "attention_chunk_size": 8, "intermediate_size_mlp": 160,
                         "num_local_experts": 4}, "Llama4TextAttention"),
    ],
)  # fmt: skip
def test_what_mixes_tokens_in_a_way_of_its_own_is_named(kind: str, more, mixer: str) -> None:
    assert describe(small(kind, **more), kind).mixers == (mixer,)


@of_newest  # older ones repeat keys before the scan
def test_states_are_those_of_the_functions_that_carry_them() -> None:
    """Gated DeltaNet: convolved are q, k and v; the scan reads them, a gate and a factor a head, and has a matrix a
    head, in fp32. Falcon-H1 has both a scan and attention in a layer."""
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    linear, full = describe(small("qwen3_5_text", head_dim=16, linear_value_head_dim=6, **delta), "x").kinds
    assert linear.states == (
        StateKind(function="causal_conv1d_fn", inputs=56, outputs=56, state=3 * 56, is_wide=False),
        StateKind(function="torch_chunk_gated_delta_rule", inputs=64, outputs=24, state=4 * 8 * 6),
    )
    assert linear.attention is None
    assert [one.name for one in linear.products[:5]] == [
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "out_proj",
    ]
    assert not full.states
    (both,) = describe(small("falcon_h1", mamba_d_ssm=96, mamba_n_heads=8, mamba_d_head=12, head_dim=16), "x").kinds
    assert [one.function for one in both.states] == ["causal_conv1d_fn", "mamba2_chunk_scan"]
    assert both.attention is not None


def test_layers_alike_are_those_of_their_sizes() -> None:
    """Which megatron and torchtitan give without a configuration, as do cost files of earlier versions."""
    sizes = {"name": "x", "num_layers": 6, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    sizes |= {"ffn_hidden_size": 160, "vocab_size": 97}
    assert describe(small("llama"), "x") == alike_model(**sizes)
    experts = alike_model(**sizes, num_experts=6, experts_per_token=2)
    assert describe(small("mixtral", **_EXPERTS), "x") == experts
    gpt2 = describe(AutoConfig.for_model("gpt2", n_embd=64, n_layer=6, n_head=4, vocab_size=97), "x")
    sizes |= {"num_kv_heads": 4, "ffn_hidden_size": 256, "tied_embeddings": True, "gated_ffn": False, "biases": True}
    like = alike_model(**sizes, position_rows=1024)
    assert (gpt2.num_parameters, gpt2.position_rows) == (like.num_parameters, 1024)
    assert gpt2.kinds[0].copied_parameters == like.kinds[0].copied_parameters


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("gpt_oss", {"head_dim": 16, "sliding_window": 9, **_EXPERTS}),
        ("deepseek_v3", {**_GLM, **_LATENT, "n_group": 2, "topk_group": 1}),
        ("glm4_moe", {"head_dim": 16, **_GLM, "n_group": 1, "topk_group": 1}),
        ("minimax_m2", {"head_dim": 16, **_EXPERTS}),
        ("olmo3", {"sliding_window": 5}),
        ("ministral3", {"head_dim": 16}),
        ("smollm3", {}),
        ("granite", {}),
        ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 40}),
        ("cohere2", {"head_dim": 16}),
        ("qwen3_5_text", {"head_dim": 16}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_keep_the_bytes_that_are_predicted(kind: str, more) -> None:
    """Under every policy, and keys and values: of experts, latent attention, sinks, and of a mixer nothing."""
    config = small(kind, **more)
    model = msgspec.structs.replace(describe(config, kind), bytes_per_element=4)
    counted = activation_bytes(stage_of(config, torch.float32)[0], model, 1)
    assert counted["replay"] > counted["recompute"] > counted["offload"] == 0


def test_backward_reads_what_a_norm_follows() -> None:
    unread = {
        kind: {one.name for one in describe(small(kind), kind).kinds[0].products if not one.is_read}
        for kind in ("llama", "olmo2", "phi")
    }
    assert unread == {"llama": {"down_proj"}, "olmo2": set(), "phi": {"dense", "fc2"}}


def test_of_text_and_pictures_the_text_is_planned() -> None:
    text = small("gemma3_text", head_dim=16, sliding_window=7)
    tree = {"model_type": "gemma3", "text_config": text.to_dict(), "tie_word_embeddings": True}
    assert model_from_config(json.loads(json.dumps(tree)), "x") == describe(text, "x")


def test_a_configuration_is_read_once_and_then_without_torch(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    small("qwen3", head_dim=16, hidden_size=80).save_pretrained(folder)
    monkeypatch.setattr(hub, "_read", {})
    first = model_from(str(folder))
    assert first.name == "mine"
    monkeypatch.setattr(hub, "_read", {})
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    assert model_from(str(folder / "config.json")) == first
    monkeypatch.setattr(hub, "_read", {})
    with monkeypatch.context() as without:
        without.setattr(hub, "distributions", lambda name: ())
        assert model_from(str(folder)) == first, "as any transformers has read it"
    monkeypatch.setattr(hub, "_read", {})
    with monkeypatch.context() as other:
        other.setattr(hub, "distributions", lambda name: (SimpleNamespace(version="9.9"),))
        with pytest.raises(ConfigError, match="was not read here before"):
            model_from(str(folder))
    small("qwen3", head_dim=16, hidden_size=96).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"was not read here before.*pip install 'evenload\[train\]'.*llama-7b"):
        model_from(str(folder))


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"model_type": "no_such"}, "makes no configuration"),
        ({"hidden_size": 64}, "makes no configuration"),
        ({"model_type": "t5"}, "cannot be told from transformers' model"),
    ],
)
def test_what_is_no_decoder_is_refused(tree, named: str) -> None:
    with pytest.raises(ConfigError, match=f"model mine: .*{named}"):
        model_from_config(tree, "mine")
