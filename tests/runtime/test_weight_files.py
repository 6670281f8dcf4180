"""What is wrong with a model's directory is one line before training, found by headers."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from evenload.errors import ConfigError, EvenloadError, UnsupportedModelError
from evenload.runtime.model.configured import load_config
from evenload.runtime.model.hf_model import build_stage_model, require_model
from evenload.runtime.model.supported import position_warning
from evenload.runtime.model.weight_files import INDEX_FILE, SINGLE_FILE, stored_weights
from reference_training import tiny_config

NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny Llama as transformers saves it."""
    root = tmp_path_factory.mktemp("saved")
    model = AutoModelForCausalLM.from_config(tiny_config("llama", num_hidden_layers=2), dtype=torch.float32)
    model.save_pretrained(root / "model")
    return root / "model"


@pytest.fixture
def model(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def edit_config(model: Path, **changes) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(model: Path, change) -> None:
    tensors = load_file(model / SINGLE_FILE)
    change(tensors)
    save_file(tensors, model / SINGLE_FILE, metadata={"format": "pt"})


def index_of(model: Path, content) -> None:
    (model / SINGLE_FILE).rename(model / "part.safetensors")
    text = content if isinstance(content, str) else json.dumps(content)
    (model / INDEX_FILE).write_text(text)


def refusal(model: Path) -> str:
    """The one line that refuses a directory; "" where none does."""
    try:
        require_model(load_config(str(model)), str(model))
    except EvenloadError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    return message


def test_a_whole_directory_passes_and_loads(model):
    assert refusal(model) == ""
    stage = build_stage_model(
        load_config(str(model)), layers=(0, 2), dtype=torch.float32, device=torch.device("cpu"), weights=str(model),
        seed=0,
    )  # fmt: skip
    expected = load_file(model / SINGLE_FILE)
    found = {name: parameter for named in stage.unit_parameters() for name, parameter in named}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_damaged_files_are_told_from_their_headers(model):
    file = model / SINGLE_FILE
    whole = file.read_bytes()
    for content, what in (
        (whole[:-100], "is damaged: it has"),
        (whole + b"x", "is damaged: it has"),
        (whole[:4], "is not a safetensors file"),
        (b"", "is not a safetensors file"),
        (b"garbage " * 50, "is not a safetensors file (ValueError: a header of"),
        (struct.pack("<Q", 5) + b"[1,2]", "is not a safetensors file"),
        (struct.pack("<Q", 9) + b'{"a":"b"}', "is not a safetensors file"),
    ):
        file.write_bytes(content)
        assert f"{file} {what}" in refusal(model), content[:20]


def test_a_damaged_index_is_told(model):
    index_of(model, "{not json")
    assert "model.safetensors.index.json is not JSON" in refusal(model)
    for content in ({}, [], {"weight_map": 3}, {"weight_map": {"a": 3}}):
        (model / INDEX_FILE).write_text(json.dumps(content))
        assert "has no 'weight_map'" in refusal(model)
    for file, what in (
        ("lost.safetensors", "names 'lost.safetensors' for 'a', and there is no such file"),
        ("../model/part.safetensors", "which is not in its directory"),
        ("part.safetensors", "says that 'a' is in part.safetensors, which does not hold it"),
    ):
        (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
        assert what in refusal(model)
    names = dict.fromkeys(load_file(model / "part.safetensors"), "part.safetensors")
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    assert refusal(model) == ""
    assert stored_weights(model)[NORM].shape == (48,)


def test_quantised_weights_are_never_read_as_plain_ones(model):
    def to_int8(tensors):
        tensors[NORM] = tensors[NORM].to(torch.int8)

    edit_tensors(model, to_int8)
    assert f"'{NORM}' is stored as I8, so the weights are quantised; only F64, F32, F16, BF16" in refusal(model)


def test_fp8_weights_and_their_scales_are_refused(model):
    name = "model.layers.1.mlp.up_proj.weight"

    def to_fp8(tensors):
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.ones(1, 1)

    edit_tensors(model, to_fp8)
    assert f"'{name}' is stored as F8_E4M3" in refusal(model)
    edit_tensors(model, lambda tensors: tensors.update({name: tensors[name].float()}))
    assert f"no place for 1 tensors, such as '{name}_scale_inv'" in refusal(model)


def test_a_quantization_config_is_refused_by_its_method(model):
    edit_config(model, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match=r"quantization_config \(fp8\).*Dequantise"):
        load_config(str(model))


def test_tensors_without_a_place_and_places_without_a_tensor(model):
    bias = "model.layers.0.self_attn.q_proj.bias"
    edit_tensors(model, lambda tensors: tensors.update({bias: torch.ones(48)}))
    assert f"no place for 1 tensors, such as '{bias}' of shape (48,)" in refusal(model)
    edit_config(model, attention_bias=True)
    assert "no tensor 'model.layers.0.self_attn.k_proj.bias'" in refusal(model)
    edit_config(model, attention_bias=False)
    edit_tensors(model, lambda tensors: (tensors.pop(bias), tensors.update({NORM: torch.ones(47)})))
    assert f"'{NORM}' has shape (47,), the model needs (48,)" in refusal(model)


def test_what_no_result_depends_on_may_lie_there_too(model):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6), "model.position_ids": torch.arange(9)}
    edit_tensors(model, lambda tensors: tensors.update(extra))
    assert refusal(model) == ""
    edit_config(model, tie_word_embeddings=True)
    assert refusal(model) == "", "a head of its own is not read where embeddings are tied"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "foo"}, r"hidden_act is 'foo', which transformers does not know"),
        ({"hidden_act": "sillu"}, r"did you mean 'silu'"),
        ({"pad_token_id": 999}, r"pad_token_id is 999, must be below the vocab_size of 97, or null"),
        ({"num_hidden_layers": "two"}, r"transformers cannot read config\.json \(Validation error"),
        ({"model_type": "strange"}, r"transformers cannot read config\.json \(The checkpoint you are trying to load"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}, r"transformers cannot read config\.json"),
        ({"head_dim": -4}, r"transformers cannot make a Llama of it"),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_line(model, changes, message):
    edit_config(model, **changes)
    with pytest.raises(ConfigError, match=message):
        require_model(load_config(str(model)), None)


def test_positions_beyond_the_models_are_told():
    config = tiny_config("llama", max_position_embeddings=128)
    assert position_warning(config, 128) == ""
    assert "up to 129 tokens (data.max_document_tokens), and config.json says max_position_embeddings = 128" in (
        position_warning(config, 129)
    )
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
    config = tiny_config("llama", max_position_embeddings=128, rope_parameters=scaled)
    assert position_warning(config, 512) == ""
    assert position_warning(config, 513)
