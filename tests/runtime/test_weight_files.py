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
from evenload.runtime.model.hf_model import require_model
from evenload.runtime.model.model_config import load_config
from evenload.runtime.model.weight_files import INDEX_FILE, SINGLE_FILE, stored_weights
from reference_training import make_tokens, stage_model, tiny_config
from single_stage import packs_of, run_single_stage

NORM = "model.layers.0.input_layernorm.weight"
HEAD, WORDS = "lm_head.weight", "model.embed_tokens.weight"


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
    stage = stage_model(load_config(str(model)), torch.float32, weights=str(model))
    expected = load_file(model / SINGLE_FILE)
    result = {name: parameter for named in stage.unit_parameters() for name, parameter in named}
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def test_damaged_files_are_told_from_their_headers(model):
    file = model / SINGLE_FILE
    whole = file.read_bytes()
    for content, what in (
        (whole[:-100], "file not fully covered"),
        (whole + b"x", "file not fully covered"),
        (whole[:4], "header too small"),
        (b"", "header too small"),
        (b"garbage " * 50, "header too large"),
        (struct.pack("<Q", 5) + b"[1,2]", "invalid JSON in header"),
        (struct.pack("<Q", 9) + b'{"a":"b"}', "invalid JSON in header"),
    ):
        file.write_bytes(content)
        message = refusal(model)
        assert f"{file} is damaged, or not a safetensors file (" in message, content[:20]
        assert what in message
        assert "fetch it again" in message


def test_a_damaged_index_is_taken(model):
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


def losses(model: Path) -> tuple[float, float]:
    """Of the same documents: ours, and that of the model that transformers loads."""
    config = load_config(str(model))
    tokens = make_tokens([31, 12], config.vocab_size)
    packs = packs_of([31, 12], [0.4], 20, last_first=False), packs_of([31, 12], [], 50, last_first=True)
    ours = run_single_stage(config, torch.float64, tokens, *packs, directory=str(model))[0]
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    with torch.no_grad():
        sums = [
            torch.nn.functional.cross_entropy(theirs(one[None]).logits[0, :-1], one[1:], reduction="sum")
            for one in tokens.values()
        ]
    return ours, float(sum(sums)) / 41


def head_of(change):
    """Embeddings are tied, and the head in the file is what `change` makes of them."""

    def edit(tensors):
        tensors[HEAD] = change(tensors[WORDS].clone())

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        head_of(lambda words: words),
        lambda tensors: tensors.pop(HEAD),
        lambda tensors: tensors.update({HEAD: tensors.pop(WORDS)}),
        lambda tensors: tensors.update({WORDS: tensors[WORDS].half().float(), HEAD: tensors[WORDS].half()}),
    ],
    ids=["same", "none", "head-only", "float16"],
)
def test_a_head_that_is_the_embedding_trains_tied_as_transformers_does(model, edit):
    edit_config(model, tie_word_embeddings=True)
    edit_tensors(model, edit)
    assert refusal(model) == ""
    ours, theirs = losses(model)
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_head_of_its_own_beside_tied_embeddings_is_refused_by_name(model):
    """transformers keeps such a head, so that its loss is another one than that of one tensor."""
    untied = losses(model)
    assert untied[0] == pytest.approx(untied[1], rel=1e-6)
    edit_config(model, tie_word_embeddings=True)
    message = refusal(model)
    assert f"{model / SINGLE_FILE}: '{HEAD}' is not '{WORDS}', which config.json ties to it" in message
    assert "(tie_word_embeddings = true); it is off by up to " in message
    assert "Set tie_word_embeddings to false to train both" in message
    kept = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    assert not torch.equal(kept.lm_head.weight, kept.model.embed_tokens.weight)
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        losses(model)


def test_an_untied_model_without_a_head_is_never_filled_by_chance(model):
    edit_tensors(model, lambda tensors: tensors.pop(HEAD))
    assert f"no tensor '{HEAD}' (tie_word_embeddings = false)" in refusal(model)
    edit_tensors(model, lambda tensors: tensors.update({HEAD: tensors.pop(WORDS)}))
    assert f"no tensor '{WORDS}'" in refusal(model)


def test_rotary_frequencies_of_old_files_are_left_out(model):
    for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        edit_tensors(model, lambda tensors, name=name: tensors.update({name: torch.ones(4)}))
    assert refusal(model) == ""


def test_gpt2_masks_of_old_files_are_left_out(tmp_path):
    config = tiny_config("gpt2", num_hidden_layers=1, tied=True)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    whole.save_pretrained(tmp_path)
    mask = torch.ones(1, 1, 512, 512).tril()
    edit_tensors(tmp_path, lambda tensors: tensors.update({"transformer.h.0.attn.bias": mask}))
    edit_tensors(tmp_path, lambda tensors: tensors.update({"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}))
    ours, theirs = losses(tmp_path)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.bias",
        "score.weight",
        "v_head.summary.weight",
        "model.layers.2.input_layernorm.weight",
        "model.mtp.layers.0.eh_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.attn.bias",
        "model.position_ids",
        "base_model.model.model.norm.weight",
        "embed_tokens.weight",
    ],
)
def test_every_other_tensor_without_a_place_is_refused_by_its_name(model, name):
    edit_tensors(model, lambda tensors: tensors.update({name: torch.ones(48)}))
    assert f"'{name}'" in refusal(model)


def test_files_among_which_transformers_would_choose_another_are_refused(model):
    tensors = load_file(model / SINGLE_FILE)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, model / "other.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "other.safetensors")}
    (model / INDEX_FILE).write_text(json.dumps(index))
    assert "names other files than model.safetensors, which transformers reads" in refusal(model)
    (model / SINGLE_FILE).unlink()
    assert refusal(model) == ""
    save_file({NORM: tensors[NORM], WORDS: tensors[WORDS]}, model / "third.safetensors")
    index["weight_map"][WORDS] = "third.safetensors"
    (model / INDEX_FILE).write_text(json.dumps(index))
    assert "is in other.safetensors and third.safetensors" in refusal(model)


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
