"""Weights of every family go in and out as transformers itself converts them, unit by unit, bit for bit."""

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, conversion_mapping, core_model_loading

from evenload.runtime.model import export_files
from evenload.runtime.model.export_files import save_tensors, shard_units, write_index
from evenload.runtime.model.hf_model import empty_model
from evenload.runtime.model.weight_conversion import stored_tensors
from evenload.runtime.model.weight_files import fill_constants, fitting_weights
from stored_families import FAMILIES, equal_by_name, family_config, random_model, units_of


def all_tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(config, dtype: torch.dtype, directory: Path) -> PreTrainedModel:
    """By our own loading, one unit after the other; buffers that no file holds, too."""
    whole = empty_model(config, dtype)
    weights = fitting_weights(whole, directory)
    tied = set(whole.all_tied_weights_keys)
    for name, unit in units_of(whole).items():
        unit.to_empty(device="cpu")
        weights.load({n: t for n, t in unit.state_dict(prefix=f"{name}.").items() if n not in tied})
        fill_constants(whole, unit)
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
    units = units_of(expected)
    for name, unit in units_of(ours).items():
        if "rotary" not in name:
            assert equal_by_name(dict(unit.named_buffers()), dict(units[name].named_buffers())), name

    write_units(ours, tmp_path / "ours")
    expected.save_pretrained(tmp_path / "again")
    assert equal_by_name(all_tensors(tmp_path / "ours"), all_tensors(tmp_path / "again"))
    assert all_tensors(tmp_path / "ours").keys() == all_tensors(tmp_path / "theirs").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=dtype)
    assert equal_by_name(again.state_dict(), expected.state_dict())
