"""Weights of every family go in and out as transformers itself converts them, unit by unit, bit for bit."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    conversion_mapping,
    core_model_loading,
)
from transformers import __version__ as version

from evenload.errors import ConfigError, EvenloadError, UnsupportedModelError
from evenload.runtime.model import export_files, weight_files
from evenload.runtime.model.export_files import save_tensors, shard_units, write_index
from evenload.runtime.model.hf_model import build_stage_model, empty_model
from evenload.runtime.model.model_config import load_config
from evenload.runtime.model.weight_conversion import stored_tensors
from evenload.runtime.model.weight_files import dequantise_once, empty_parameters, fill_buffers, fitting_weights
from evenload.runtime.stages.live_stages import unit_modules
from export_cases import export_in_stages
from stored_families import FAMILIES, equal_by_name, family_config, random_model, units_of


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(config, dtype: torch.dtype, directory: Path) -> PreTrainedModel:
    """By our own loading, one unit after the other; buffers that no file holds, too."""
    whole = empty_model(config, dtype)
    weights = fitting_weights(whole, directory)
    fill_buffers(whole, "cpu")
    tied = set(whole.all_tied_weights_keys)
    for name, unit in units_of(whole).items():
        empty_parameters(unit, "cpu")
        weights.load({n: t for n, t in unit.state_dict(prefix=f"{name}.").items() if n not in tied})
    whole.tie_weights()
    return whole


def write_units(whole: PreTrainedModel, directory: Path) -> None:
    """By our own export: one file of several units after the other."""
    directory.mkdir()
    whole.config.save_pretrained(directory)
    tied = set(whole.all_tied_weights_keys)
    units = [
        {n: t for n, t in unit.state_dict(prefix=f"{name}.").items() if n not in tied}
        for name, unit in units_of(whole).items()
    ]
    places = {}
    shards = shard_units([sum(t.nbytes for t in unit.values()) for unit in units])
    assert len(shards) > 2
    empty = empty_model(whole.config)
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {n: t for at in shard for n, t in stored_tensors(empty, units[at]).items()}
        save_tensors(tensors, directory / file)
        places |= {name: (file, tensor.nbytes) for name, tensor in tensors.items()}
    write_index(directory, places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(export_files, "SHARD_BYTES", 40_000)
    config = family_config(family, tied=family in ("gpt2", "gemma3_text", "granite"))
    random_model(config, dtype).save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=dtype)

    ours = loaded(config, dtype, tmp_path / "theirs")
    assert equal_by_name(ours.state_dict(), expected.state_dict())
    assert equal_by_name(dict(ours.named_buffers()), dict(expected.named_buffers()))

    write_units(ours, tmp_path / "ours")
    expected.save_pretrained(tmp_path / "again")
    assert equal_by_name(all_tensors(tmp_path / "ours"), all_tensors(tmp_path / "again"))
    assert all_tensors(tmp_path / "ours").keys() == all_tensors(tmp_path / "theirs").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype)
    assert equal_by_name(again.state_dict(), expected.state_dict())


@pytest.mark.parametrize(("family", "shard_bytes"), [("deepseek_v3", 220_000), ("gemma3_text", 120_000)])
def test_two_stages_write_it_together_a_file_at_a_time(gloo_pool, tmp_path, family, shard_bytes):
    config, stored, written = family_config(family, tied=family == "gemma3_text"), tmp_path / "stored", tmp_path / "out"
    random_model(config, torch.float32).save_pretrained(stored)
    written.mkdir()
    (written / "model-00009-of-00009.safetensors").write_bytes(b"of an earlier export")
    most_bytes = gloo_pool.run(2, export_in_stages, stored, written, 2, shard_bytes)
    files = sorted(file.name for file in written.glob("*.safetensors"))
    assert files == [f"model-{at:05d}-of-{len(files):05d}.safetensors" for at in range(1, len(files) + 1)]
    assert len(files) > 2
    assert max(most_bytes) <= shard_bytes
    expected = AutoModelForCausalLM.from_pretrained(stored)
    assert equal_by_name(all_tensors(written), all_tensors(stored))
    assert equal_by_name(AutoModelForCausalLM.from_pretrained(written).state_dict(), expected.state_dict())
    settings = [json.loads((one / "config.json").read_text()) for one in (stored, written)]
    assert settings[0] == settings[1]


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2"])
def test_every_rank_has_the_biases_that_choose_experts_of_all_layers(tmp_path, family):
    """A switch to another layout moves parameters only."""
    config = family_config(family)
    expected = random_model(config, torch.float32)
    expected.save_pretrained(tmp_path)
    here = torch.device("cpu")
    stage = build_stage_model(config, layers=(0, 1), dtype=torch.float32, device=here, weights=str(tmp_path), seed=1)
    whole, _ = unit_modules([stage], dtype=torch.float32, device=here, lora=None, tp_rank=0, tp=1)
    for one in (stage.whole, whole):
        biases = [
            (path, buffer)
            for index in range(3)
            for path, buffer in one.layers[index].named_buffers(prefix=f"model.layers.{index}")
        ]
        assert len(biases) >= 2
        assert all(torch.equal(bias, expected.get_buffer(path)) for path, bias in biases)


# ---- what is read, and what is refused ---------------------------------------------------------------


@pytest.fixture
def saved(tmp_path) -> Path:
    """A model with experts that are stored one by one, in one file."""
    random_model(family_config("qwen3_moe"), torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(directory: Path, family: str = "qwen3_moe") -> str:
    """The one line that refuses a directory, without a weight being read; "" where none does."""
    try:
        fitting_weights(empty_model(family_config(family)), directory)
    except EvenloadError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    return message


def expert(number: int, part: str, layer: int = 1) -> str:
    return f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"


def test_a_unit_reads_its_own_tensors_once_each_and_no_others(saved, monkeypatch):
    read = []

    class Recorded:
        def __init__(self, file, framework):
            self.tensors = safe_open(file, framework)
            self.keys, self.get_slice = self.tensors.keys, self.tensors.get_slice

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def get_tensor(self, name):
            read.append(name)
            return self.tensors.get_tensor(name)

    monkeypatch.setattr(weight_files, "safe_open", Recorded)
    whole = empty_model(family_config("qwen3_moe"))
    weights = fitting_weights(whole, saved)
    assert not read
    name = "model.layers.1"
    unit = whole.get_submodule(name).to_empty(device="cpu")
    weights.load(unit.state_dict(prefix=f"{name}."))
    assert sorted(read) == sorted(stored for stored in load_file(saved / "model.safetensors") if f"{name}." in stored)


def test_the_biases_that_choose_experts_stay_fp32_and_the_rest_does_not():
    for family in FAMILIES:
        types = {
            name: tensor.dtype
            for name, tensor in empty_model(family_config(family), torch.bfloat16).state_dict().items()
        }
        precise = {name for name, dtype in types.items() if dtype != torch.bfloat16}
        assert all("e_score_correction_bias" in name for name in precise), family
        assert bool(precise) == (family in ("glm4_moe", "deepseek_v3")), family


def moved(source: str, target: str):
    return lambda tensors: tensors.update({target: tensors.pop(source)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(expert(3, "up")), f"no tensor '{expert(3, 'up')}', but others of its kind"),
        (lambda tensors: tensors.pop(expert(10, "down")), "; it has shape (10, 48, 24), the model needs (11, "),
        (lambda tensors: tensors.pop(expert(10, "gate")), f"no tensor '{expert(10, 'gate')}', but others of its kind"),
        # Joined by their order, the wrong ones would be taken without a sign.
        (moved(expert(3, "down"), expert(11, "down")), f"no tensor '{expert(3, 'down')}', but others of its kind"),
        (lambda tensors: tensors.update({expert(11, "down"): torch.ones(48, 24)}), "; it has shape (12, 48, 24), the"),
        (lambda tensors: tensors.update({expert(4, "down"): torch.ones(3, 3)}), "; these do not fit together (stack"),
        (
            lambda tensors: [tensors.pop(expert(at, "up")) for at in range(11)],
            "which transformers makes of mlp.experts.*.gate_proj.weight and mlp.experts.*.up_proj.weight; these do not",
        ),
        (
            lambda tensors: [tensors.pop(expert(at, "down")) for at in range(11)],
            "no tensor 'model.layers.1.mlp.experts.down_proj'",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": torch.ones(11, 48, 24)}),
            "are both 'model.layers.1.mlp.experts.down_proj' of the model; remove one",
        ),
        (
            lambda tensors: tensors.update({"norm.weight": torch.ones(48)}),
            "'model.norm.weight' and 'norm.weight' are both 'model.norm.weight' of the model; remove one",
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.gate_up_proj_blocks": torch.ones(4).byte()}),
            "'model.layers.1.mlp.experts.gate_up_proj_blocks' is stored as U8, so the weights are quantised",
        ),
        (moved(expert(0, "down", 2), expert(0, "down", 3)), "no tensor"),
    ],
)  # fmt: skip
def test_experts_that_are_not_exactly_the_models_are_refused(saved, change, message):
    assert refusal(saved) == ""
    edit(saved, change)
    assert message in refusal(saved)


def test_what_a_model_does_without_is_named_and_not_needed(tmp_path):
    """DeepSeek V3 has a 62nd layer in its files, which predicts a further token; others are refused."""
    random_model(family_config("deepseek_v3"), torch.float32).save_pretrained(tmp_path)
    extra = "model.layers.61.eh_proj.weight"
    edit(tmp_path, lambda tensors: tensors.update({extra: torch.ones(3).to(torch.float8_e4m3fn)}))
    assert refusal(tmp_path, "deepseek_v3") == ""
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.7.eh_proj.weight": torch.ones(3)}))
    assert "no place for 1 tensors, such as 'model.layers.7.eh_proj.weight'" in refusal(tmp_path, "deepseek_v3")


def test_a_missing_bias_that_chooses_experts_is_not_filled_by_chance(tmp_path):
    random_model(family_config("glm4_moe"), torch.float32).save_pretrained(tmp_path)
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    edit(tmp_path, lambda tensors: tensors.pop(bias))
    assert f"no tensor '{bias}'" in refusal(tmp_path, "glm4_moe")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_command_that_dequantises_fp8_gives_what_we_read(tmp_path, family):
    """As published: 8-bit numbers in blocks with a scale each, and config.json that says so."""
    pytest.importorskip("accelerate")
    model, scale = tmp_path / "model", 0.5
    random_model(family_config(family), torch.bfloat16).save_pretrained(model)
    expected = load_file(model / "model.safetensors")
    for name, tensor in expected.items():
        if name.endswith("_proj.weight"):
            expected[name] = tensor.to(torch.float8_e4m3fn).bfloat16() * scale
    edit(model, lambda tensors: [
        tensors.update({name: tensor.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1, 1), scale)})
        for name, tensor in list(tensors.items()) if name.endswith("_proj.weight")
    ])  # fmt: skip
    settings = json.loads((model / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (model / "config.json").write_text(json.dumps(settings | {"quantization_config": method}))
    with pytest.raises(UnsupportedModelError, match=r"quantization_config \(fp8\): .*Dequantise them once") as error:
        load_config(str(model))
    command = re.search(r'python -c "(.*)"', str(error.value))
    exec(command[1])
    whole = loaded(load_config(f"{model}-bf16"), torch.bfloat16, Path(f"{model}-bf16"))
    assert equal_by_name(stored_tensors(empty_model(whole.config), whole.state_dict()), expected)


def test_no_command_is_made_up_for_other_methods():
    assert "not quantised: transformers has no way" in dequantise_once("folder", "gptq")


# ---- transformers' private interface -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (conversion_mapping, "get_model_conversion_mapping", "model"),
        (
            core_model_loading, "rename_source_key",
            "source_key, weight_renamings, weight_converters, base_model_prefix, meta_state_dict",
        ),
        (core_model_loading, "revert_weight_conversion", "model, state_dict"),
        (core_model_loading, "dot_natural_key", "s"),
        (
            core_model_loading.WeightConverter, "add_tensor",
            "self, target_key, source_key, source_pattern, future",
        ),
        (core_model_loading.WeightConverter, "convert", "self, layer_name, model, config"),
        (PreTrainedModel, "_get_dtype_plan", "self, dtype"),
        (PreTrainedModel, "_init_weights", "self, module"),
    ],
)  # fmt: skip
def test_transformers_still_has_what_weight_conversion_calls(owner, name, parameters):
    function = getattr(owner, name, None)
    assert function is not None, f"transformers {version} has no {owner.__name__}.{name}: see weight_conversion.py"
    result = ", ".join(inspect.signature(function).parameters)
    assert result.startswith(parameters), (
        f"transformers {version} changed {owner.__name__}.{name}: see weight_conversion.py"
    )


def test_transformers_still_has_the_attributes_that_weight_conversion_reads():
    whole = empty_model(family_config("deepseek_v3", tied=True))
    assert whole.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert whole._keys_to_ignore_on_load_unexpected == {r"model\.layers\.61.*"}
    assert whole._keys_to_ignore_on_save == set()
    rules = conversion_mapping.get_model_conversion_mapping(whole)
    assert {type(rule) for rule in rules} <= {core_model_loading.WeightConverter, core_model_loading.WeightRenaming}
    assert any(isinstance(rule, core_model_loading.WeightConverter) and rule.source_patterns for rule in rules)
    assert not hasattr(whole, "_weight_conversions"), "else transformers stores what was loaded, not by its tables"


def test_the_text_part_of_a_model_of_text_and_pictures_is_read(tmp_path):
    """Its weights by their own names, those of pictures by none; one that is missing is still missed."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=sizes | {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40},
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=39, boi_token_index=38, eoi_token_index=37,
    )  # fmt: skip
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    own = load_config(str(tmp_path))
    assert type(own).__name__ == "Gemma3TextConfig"
    part, stored = loaded(own, torch.float32, tmp_path), all_tensors(tmp_path)
    assert any("vision" in name for name in stored)
    for name, value in part.state_dict().items():
        kept = stored[f"language_model.{'model.embed_tokens.weight' if name == 'lm_head.weight' else name}"]
        assert torch.equal(value, kept), name
    edit(tmp_path, lambda tensors: tensors.pop("language_model.model.norm.weight"))
    with pytest.raises(ConfigError, match=r"no tensor 'model\.norm\.weight'"):
        loaded(own, torch.float32, tmp_path)
