"""Exported files can be read by others, and the run's tokeniser lies beside the model."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evenload.data.config import DataConfig
from evenload.data.encoding.tokenize import FileTokenizer, train_byte_pair_tokenizer
from evenload.errors import ConfigError
from evenload.runtime.model.export_files import copy_tokenizer, save_tensors, tokenizer_note
from reference_training import tiny_config

TEXT = "a text,  with spaces\nand <|endoftext|>"


def data_of(**changes) -> DataConfig:
    return DataConfig(sources=("x",), batch_documents=1, max_document_tokens=8, **changes)


@pytest.fixture
def base(tmp_path) -> Path:
    """A model's directory: tokeniser and settings."""
    train_byte_pair_tokenizer(["a text with words"] * 3, 270, tmp_path / "base" / "tokenizer.json")
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 0}')
    (tmp_path / "base" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "!"})
    )
    (tmp_path / "base" / "private.txt").write_text("stays")
    return tmp_path / "base"


@pytest.fixture
def exported(tmp_path) -> Path:
    tiny_config("qwen2", vocab_size=270).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_tensor_files_have_the_permissions_of_new_files(tmp_path, umask):
    before = os.umask(umask)
    try:
        for _ in range(2):  # also where an earlier export lies there
            save_tensors({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("named", ["directory", "file", "ids"])
def test_the_tokeniser_lies_beside_the_model_and_loads(base, exported, named):
    data = {
        "directory": data_of(tokenizer=str(base)),
        "file": data_of(tokenizer=str(base / "tokenizer.json")),
        "ids": data_of(record="tokens"),
    }[named]
    copy_tokenizer(exported, data, str(base))
    loaded = AutoTokenizer.from_pretrained(exported)
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == FileTokenizer(base).encode(TEXT).tolist()
    assert (loaded.eos_token, loaded.pad_token, loaded.chat_template) == ("<|endoftext|>", "!", "{{ messages }}")
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert not (exported / "private.txt").exists()
    assert tokenizer_note(exported, data, str(base)) == f"with the tokeniser of {base}"


def test_a_tokeniser_alone_gets_the_settings_that_load_it(base, exported, tmp_path):
    """transformers would otherwise choose a class by the model, which may make other tokens."""
    (base / "tokenizer_config.json").unlink()
    template = tmp_path / "own.jinja"
    template.write_text("{{ 1 }}")
    data = data_of(tokenizer=str(base), chat_template=str(template), eos_token="<|endoftext|>")
    copy_tokenizer(exported, data, str(exported))
    loaded = AutoTokenizer.from_pretrained(exported)
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == FileTokenizer(base).encode(TEXT).tolist()
    assert (loaded.eos_token, loaded.chat_template) == ("<|endoftext|>", "{{ 1 }}")


def test_other_tokens_than_were_trained_are_told(base, exported):
    """transformers takes its own class for qwen2, which splits numbers into digits; this tokeniser does not."""
    train_byte_pair_tokenizer([" 12: 2048"] * 3, 270, base / "tokenizer.json")
    data = data_of(tokenizer=str(base))
    copy_tokenizer(exported, data, str(base))
    note = tokenizer_note(exported, data, str(base))
    assert "warning: AutoTokenizer takes Qwen2Tokenizer for this kind of model and makes other tokens" in note
    loaded = PreTrainedTokenizerFast.from_pretrained(exported)
    assert loaded("in 2048", add_special_tokens=False)["input_ids"] == FileTokenizer(base).encode("in 2048").tolist()


def test_bytes_leave_nothing_and_say_so(exported, base):
    for data in (data_of(), data_of(tokenizer="bytes")):
        copy_tokenizer(exported, data, str(exported))
        assert tokenizer_note(exported, data, str(base)) == "without a tokeniser: it trained on plain bytes"
    assert not (exported / "tokenizer.json").exists()
    assert (
        tokenizer_note(exported, data_of(record="tokens"), str(exported))
        == "without a tokeniser: records hold token ids"
    )


def test_an_export_onto_its_own_source_changes_nothing(base):
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    copy_tokenizer(base, data_of(tokenizer=str(base)), str(base))
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before


def test_a_file_that_cannot_be_copied_is_told(base, tmp_path):
    with pytest.raises(ConfigError, match=r"exported to .*, but a file of its tokeniser could not be copied there"):
        copy_tokenizer(tmp_path / "missing", data_of(tokenizer=str(base)), str(base))
