"""LoRA: only adapters are trained, exactly as `peft` trains them, and come back as a PEFT directory."""

import json

import pytest
import torch

from adapter_cases import LORA, adapter_loss_and_gradients, all_tensors, make_adapters_matter
from causal_types import tiny_causal_config
from evenload.config.sections import LoraConfig, target_linears, with_adapters
from evenload.cost.memory import parameters_per_rank, static_bytes
from evenload.data.hub import model_from_config
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.runtime.model.lora import write_adapter
from evenload.runtime.optim.data_parallel import flatten_units, frozen_bytes
from evenload.runtime.replay.store import ActivationStore
from evenload.types.layout import even_layout
from reference_training import KINDS, make_tokens, relative_error, stage_model, tiny_config
from single_stage import pack_tokens, packs_of, sliced_packs, stage_of, trained

pytestmark = [
    # peft asks transformers by an old name,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # and says how GPT-2's matrices lie.
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False but the target module is `Conv1D`:UserWarning"),
]

LENGTHS = [61, 30, 1, 7, 2, 1, 19]


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_gradients_equal_peft(kind, tmp_path):
    """Every linear of every architecture, asymmetric packs; the base gets no gradient at all. Where linears of dense
    layers are called as experts' matrices, peft would adapt these too: only attention's output gets adapters there."""
    has_both = kind in ("glm4_moe", "deepseek_v3")
    lora = LoraConfig(rank=3, alpha=6.0, target_modules=("o_proj",)) if has_both else LORA
    assert_equals_peft(tiny_config(kind, tied=kind == "llama"), lora, tmp_path)


def test_layers_may_have_different_linears(tmp_path):
    """What a target names in some layers only is trained there."""
    config = tiny_causal_config("lfm2")
    whole = packs_of(LENGTHS, [], 70, last_first=False)
    names = assert_equals_peft(config, LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "w1")), tmp_path, whole)
    assert {name.split(".")[2] for name in names if ".q_proj." in name} == {"1", "3"}
    assert {name.split(".")[2] for name in names if ".w1." in name} == {"0", "1", "2", "3"}
    with pytest.raises(ConfigError, match=r"has 'w4'; a layer of this model has the linears in_proj, .*, v_proj"):
        stage_model(config, lora=LoraConfig(rank=3, alpha=6.0, target_modules=("w4",)))


def test_all_linears_have_a_name():
    known = dict.fromkeys(("q_proj", "up_proj"))
    assert target_linears(known, LoraConfig()) == target_linears(known, LoraConfig(target_modules="all-linear"))
    assert target_linears(known, LoraConfig()) == ["q_proj", "up_proj"]
    assert target_linears(known, LoraConfig(target_modules=("up_proj",))) == ["up_proj"]
    with pytest.raises(ConfigError, match='must be at least one linear, or "all-linear"'):
        LoraConfig(target_modules=())


def test_what_peft_would_mistake_for_experts_is_refused():
    """It loads an adapter of a dense layer's linears into the experts of other layers."""
    config = tiny_config("qwen3_moe", mlp_only_layers=[0])
    named = r'trains down_proj, gate_proj, up_proj of .* = \["k_proj", "o_proj", "q_proj", "v_proj"\]'
    with pytest.raises(ConfigError, match=named):
        stage_model(config, lora=LORA)
    for kind in ("up_proj", "down_proj"):
        with pytest.raises(ConfigError, match=f"trains {kind} of layers beside experts"):
            stage_model(config, lora=LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", kind)))
    stage_model(config, lora=LoraConfig(rank=3, alpha=6.0, target_modules=("k_proj", "o_proj", "q_proj", "v_proj")))


def assert_equals_peft(config, lora, tmp_path, packs=None):
    """Asymmetric packs by default; returns the names of what is trained."""
    tokens = make_tokens(LENGTHS, config.vocab_size)
    stage, buffers = stage_of(config, lora=lora)
    make_adapters_matter(stage.model)
    tensors, adapters = all_tensors(stage.model), trained(buffers)
    assert set(adapters) == {n for n in tensors if ".lora_" in n}
    store = ActivationStore({d: len(t) for d, t in tokens.items()}, [])
    labels = sum(len(t) - 1 for t in tokens.values())
    forward, backward = (packs, packs) if packs else sliced_packs(LENGTHS)
    for pack in forward:
        stage.forward(pack_tokens(pack, tokens), None, store)
    loss = sum(stage.backward(pack_tokens(pack, tokens), None, store, labels)[1].item() for pack in backward)
    plain_loss, gradients = adapter_loss_and_gradients(config, tensors, tmp_path, tokens, torch.float64)
    assert loss == pytest.approx(plain_loss, rel=1e-11)
    assert set(gradients) == set(adapters)
    for name, parameter in adapters.items():
        assert gradients[name].norm() > 0
        assert relative_error(parameter.main_grad, gradients[name]) <= 1e-11, name
    frozen = [p for module in stage.model.modules for p in module.parameters() if not p.requires_grad]
    assert all(p.grad is None and not hasattr(p, "main_grad") for p in frozen)
    return set(adapters)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_moe"])
def test_static_bytes_are_those_of_adapters(kind):
    """Weights, gradients and optimizer state; the cost model does not count narrow norms."""
    config = tiny_config(kind)
    model = stage_model(config, lora=LORA)
    buffers = flatten_units(model, dp=1)
    spec = model_from_config(config.to_dict(), kind, 8)
    lora_spec = with_adapters(spec, LORA)
    (each,) = {kind.adapter_parameters for kind in lora_spec.kinds}
    assert sum(b.num_elements for b in buffers) == 4 * each
    weights = [p for module in model.modules for p in module.parameters()]
    assert frozen_bytes([model]) == sum(p.nbytes for p in weights if not p.requires_grad)
    layout = even_layout(4)
    held = frozen_bytes([model]) + sum(4 * b.values.nbytes for b in buffers)
    assert int(static_bytes(lora_spec, layout)[0]) == pytest.approx(held, rel=0.01)
    assert parameters_per_rank(lora_spec, layout)[0] - parameters_per_rank(spec, layout)[0] == 4 * each


def test_layouts_start_from_the_same_adapters():
    config = tiny_config("llama")
    whole = all_tensors(stage_model(config, lora=LORA))
    part = stage_model(config, layers=(2, 4), lora=LORA)
    for named in part.unit_parameters():
        for name, parameter in named:
            assert torch.equal(parameter, whole[name])


@pytest.fixture
def saved(tmp_path):
    """A tiny Llama's tensors with adapters, and these as a PEFT directory that `model.lora.path` names."""
    model = stage_model(tiny_config("llama"), lora=LORA)
    make_adapters_matter(model)
    tensors = all_tensors(model)
    write_adapter(tmp_path, {n: t for n, t in tensors.items() if ".lora_" in n}, LORA, "somewhere")
    return tensors, LoraConfig(rank=3, alpha=6.0, path=str(tmp_path))


def test_an_adapter_goes_on_from_its_peft_directory(saved):
    tensors, lora = saved
    again = all_tensors(stage_model(tiny_config("llama"), lora=lora))
    assert all(torch.equal(again[n], t) for n, t in tensors.items())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_dora": True}, UnsupportedModelError, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 8}}, UnsupportedModelError, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, UnsupportedModelError, "init_lora_weights is pissa"),
        ({"layer_replication": [[0, 2], [1, 4]]}, UnsupportedModelError, "layer_replication"),
        ({"alora_invocation_tokens": [5]}, UnsupportedModelError, "alora_invocation_tokens"),
        ({"key_of_a_later_version": {"a": 1}}, UnsupportedModelError, "key_of_a_later_version"),
        ({"r": 4}, ConfigError, "has rank 4"),
    ],
)
def test_other_adapters_are_refused_by_name(saved, tmp_path, change, error, message):
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=message):
        stage_model(tiny_config("llama"), lora=saved[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "model.lora.rank is 0"),
        ({"alpha": 0.0}, "model.lora.alpha is 0.0"),
        ({"dropout": 0.1}, "model.lora.dropout is 0.1, must be 0: a dropout mask would differ"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", b"{not json", "is no configuration of a LoRA adapter"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', "is no configuration of a LoRA adapter"),
        ("adapter_model.safetensors", b"garbage", "or not a safetensors file"),
    ],
)
def test_a_damaged_adapter_is_refused(saved, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        stage_model(tiny_config("llama"), lora=saved[1])
