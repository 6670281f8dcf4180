"""What the proof at start catches, and what it lets pass: whole models, some spoilt on purpose."""

import re
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaModel
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from causal_types import tiny_causal_config
from evenload.errors import UnsupportedModelError
from evenload.runtime.model import probe as probe_module
from evenload.runtime.model.probe import Findings, probe
from transformers_version import of_newest


def _found(config: PretrainedConfig, tmp_path) -> str:
    """All that is said of a model; "" = nothing."""
    try:
        findings = probe(config, tmp_path)
    except UnsupportedModelError as error:
        return str(error)
    mixers = dict.fromkeys(one for layer in findings.mixers for one in layer)
    return "; ".join(f"{one.path or 'layer'} ({one.module}) {one.why}" for one in mixers)


def _rope(**settings) -> dict:
    return {"rope_parameters": {"rope_theta": 1e4, **settings}}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", _rope(rope_type="linear", factor=4.0)),
        ("llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)),
        (
            "llama",
            _rope(
                rope_type="llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=128,
            ),
        ),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("gemma4_text", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("rope_parameters", {}).get("rope_type", "plain"),
)
def test_what_is_token_wise_passes(model_type, changes, tmp_path):
    assert _found(tiny_causal_config(model_type, **changes), tmp_path) == ""


_LONG_ROPE = {
    "original_max_position_embeddings": 32,
    **_rope(
        rope_type="longrope",
        short_factor=[1.0] * 8,
        long_factor=[3.0] * 8,
        original_max_position_embeddings=32,
        partial_rotary_factor=1.0,
    ),
}


@pytest.mark.parametrize(
    ("model_type", "changes", "said"),
    [
        ("llama", _rope(rope_type="dynamic", factor=4.0), "LlamaForCausalLM: the model around its layers lets one far"),
        ("phi3", _LONG_ROPE, "lets one far position change what others get"),
        ("gpt2", {"resid_pdrop": 0.1}, r"transformer.h.0.attn.resid_dropout \(Dropout\) draws random numbers"),
        ("gpt2", {"embd_pdrop": 0.1}, "the model around its layers draws random numbers"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"model.layers.0.mlp \(MixtralSparseMoeBlock\) draws random numbers"),
        # Older ones draw for a layer drop of 0, too, which is said first.
        pytest.param("bart", {}, "depends on a token's place, not on its position", marks=of_newest),
        ("roberta", {}, "does not count a document's positions from 0"),
        ("bloom", {}, "depends on a token's place, not on its position"),
        ("falcon", {"alibi": True}, "depends on a token's place, not on its position"),
    ],
)
def test_what_would_be_trained_wrong_is_refused_with_module_and_reason(model_type, changes, said, tmp_path):
    with pytest.raises(UnsupportedModelError, match=said):
        probe(tiny_causal_config(model_type, **changes), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "path", "module"),
    [
        ("minimax", {}, "self_attn", "MiniMaxLightningAttention"),
        ("recurrent_gemma", {}, "temporal_block", "RecurrentGemmaRecurrentBlock"),
        ("falcon", {"alibi": False}, "self_attention", "FalconAttention"),
        ("llama4_text", {}, "self_attn", "Llama4TextAttention"),
        ("deepseek_v32", {}, "self_attn", "DeepseekV32Attention"),
    ],
)
def test_modules_that_mix_rows_in_their_own_way_are_named_for_whole_documents(
    model_type, changes, path, module, tmp_path
):
    findings = probe(tiny_causal_config(model_type, **changes), tmp_path)
    assert {one.path for layer in findings.mixers for one in layer} == {path}
    assert findings.whole_documents == (module,)


def test_kinds_are_those_of_the_whole_model(tmp_path):
    config = CONFIG_MAPPING["minimax"]()
    findings = probe(config, tmp_path)
    held = [bool(mixers) for mixers in findings.mixers]
    assert held == [kind == "linear_attention" for kind in config.layer_types]


# ---- layers spoilt on purpose ---------------------------------------------------------------------------------------


def _counted(kept: dict, x: Tensor) -> Tensor:
    return x + kept.setdefault("calls", torch.zeros(())).add_(1)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("token shift", lambda x: x + 0.01 * x.roll(1, 1), "a row changes what others get"),
        ("mean of the pack", lambda x: x - x.mean(1, keepdim=True), "a row changes what others get"),
        ("largest of the pack", lambda x: x / x.detach().abs().max(), "a row changes what others get"),
        ("length of the pack", lambda x: x * x.shape[1] ** 0.5, "depends on the number of rows"),
        ("place", lambda x: x + torch.arange(x.shape[1])[None, :, None], "depends on the order of rows"),
        ("kept tensor", partial(_counted, {}), "gives other values when it runs again"),
        ("random", lambda x: x + torch.rand(()), "draws random numbers"),
    ],
)
def test_a_layer_whose_output_is_spoilt_is_caught(name, change, said, tmp_path, monkeypatch):
    plain = LlamaDecoderLayer.forward
    monkeypatch.setattr(
        LlamaDecoderLayer, "forward", lambda self, *args, **kwargs: change(plain(self, *args, **kwargs))
    )
    assert re.search(rf"\(?LlamaDecoderLayer\)?.* {said}", _found(tiny_causal_config("llama"), tmp_path))


def test_what_enters_attention_is_compared_too(tmp_path, monkeypatch):
    """Queries scaled by place change no row that attention, held, gives back."""

    def scaled(self: nn.Module, hidden_states: Tensor, *args, **kwargs):
        scale = 1 + torch.arange(hidden_states.shape[1], dtype=hidden_states.dtype)[None, :, None]
        return plain(self, hidden_states * scale, *args, **kwargs)

    plain = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", scaled)
    assert "self_attn (LlamaAttention) it depends on the order of rows" in _found(tiny_causal_config("llama"), tmp_path)


def test_experts_with_a_capacity_are_caught(tmp_path, monkeypatch):
    """As in Switch Transformer, who is dropped depends on the pack."""

    def drop(self: nn.Module, hidden: Tensor):
        logits, weights, chosen = plain(self, hidden)
        one_hot = nn.functional.one_hot(chosen, logits.shape[-1]).sum(1)
        place = one_hot.cumsum(0).gather(1, chosen)
        return logits, weights * (place <= 0.6 * chosen.numel() / logits.shape[-1]), chosen

    plain = MixtralTopKRouter.forward
    monkeypatch.setattr(MixtralTopKRouter, "forward", drop)
    assert "mlp (MixtralSparseMoeBlock)" in _found(tiny_causal_config("mixtral"), tmp_path)


@pytest.mark.parametrize("where", [GPT2Model, LlamaModel])
def test_a_prologue_or_an_epilogue_that_mixes_is_refused(where, tmp_path, monkeypatch):
    """GPT-2's embeddings, Llama's last norm."""
    attribute = "drop" if where is GPT2Model else "norm"
    plain = where.__init__

    def spoil(self: nn.Module, config: PretrainedConfig) -> None:
        plain(self, config)
        forward = getattr(self, attribute).forward
        getattr(self, attribute).forward = lambda x: forward(x - x.mean(1, keepdim=True))

    monkeypatch.setattr(where, "__init__", spoil)
    said = "lets a token change" if where is GPT2Model else "lets a row change logits of others"
    with pytest.raises(UnsupportedModelError, match=said):
        probe(tiny_causal_config("gpt2" if where is GPT2Model else "llama"), tmp_path)


# ---- attention's arguments ------------------------------------------------------------------------------------------


def _attention_given(more: Callable[[dict], dict], monkeypatch) -> None:
    plain = probe_module._attend
    spoilt = lambda module, query, key, value, mask, **given: plain(  # noqa: E731
        module, query, key, value, **(given | {"attention_mask": mask} | more({"mask": mask, "query": query}))
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "evenload_probe", spoilt)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda given: {"block_indices": torch.zeros(3)}, "attends with block_indices"),
        (lambda given: {"attention_mask": given["mask"] + 0.5}, "attends with a bias in the mask"),
        (lambda given: {"attention_mask": given["mask"] * 0}, "lets tokens see later ones"),
        (lambda given: {"attention_mask": given["mask"].flip(-1)}, "attends with a mask of another kind"),
        (lambda given: {"attention_mask": given["mask"].expand(1, 4, -1, -1)}, "attends with a mask of its own"),
    ],
)
def test_attention_that_no_range_computes_is_named(more, said, tmp_path, monkeypatch):
    _attention_given(more, monkeypatch)
    assert f"self_attn (LlamaAttention) {said}" in _found(tiny_causal_config("llama"), tmp_path)


# ---- cache, speed, and what is left as it was -----------------------------------------------------------------------


def test_findings_and_refusals_are_kept_by_configuration(tmp_path, monkeypatch):
    lfm2, spoilt = tiny_causal_config("lfm2"), tiny_causal_config("gpt2", embd_pdrop=0.1)
    found, refused = probe(lfm2, tmp_path), _found(spoilt, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(probe_module, "_prove", lambda config: pytest.fail("proves again"))
    start = time.perf_counter()
    assert probe(tiny_causal_config("lfm2"), tmp_path) == found
    assert _found(spoilt, tmp_path) == refused
    assert time.perf_counter() - start < 0.5
    monkeypatch.setattr(probe_module, "_prove", lambda config: Findings(mixers=()))
    assert probe(tiny_causal_config("lfm2", conv_L_cache=4), tmp_path).mixers == ()


def test_the_cache_is_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe(tiny_causal_config("llama"))
    assert list((tmp_path / "evenload" / "probe").glob("*.json"))


def test_where_nothing_can_be_kept_it_is_said(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.warns(UserWarning, match=r"probed again by the next run: .*home/probe cannot be written"):
        assert probe(tiny_causal_config("llama"), tmp_path / "home" / "probe").whole_documents == ()


@pytest.mark.parametrize("model_type", ["deepseek_v3", "gpt_oss"])
def test_a_big_model_takes_seconds_of_a_core(model_type, tmp_path):
    start = time.process_time()
    assert probe(CONFIG_MAPPING[model_type](), tmp_path).whole_documents == ()
    assert time.process_time() - start < 10


def test_the_configuration_and_torch_are_as_before(tmp_path):
    config = tiny_causal_config("mixtral")
    before, random = config.to_dict(), torch.get_rng_state()
    probe(config, tmp_path)
    assert config.to_dict() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
