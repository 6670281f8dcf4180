"""Exported files can be read by others, and the run's tokeniser lies beside the model."""

import json
import os
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from evenload.data.chat_encoding import open_encoder
from evenload.data.config import DataConfig
from evenload.data.tokenize import FileTokenizer, train_byte_pair_tokenizer
from evenload.errors import ConfigError
from evenload.runtime.model.export_files import (
    copy_tokenizer,
    exported_tokenizer_note,
    require_same_token_ids,
    save_tensors,
)
from reference_training import tiny_config

TEXT = "a text,  with spaces\nand <|endoftext|>"


def data_of(**changes) -> DataConfig:
    return DataConfig(
        **({"sources": ("x",), "record": "text", "batch_documents": 1, "max_document_tokens": 8} | changes)
    )


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
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == FileTokenizer(base).encode_batch([TEXT])[0].tolist()
    assert (loaded.eos_token, loaded.pad_token, loaded.chat_template) == ("<|endoftext|>", "!", "{{ messages }}")
    assert json.loads((exported / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert not (exported / "private.txt").exists()
    assert exported_tokenizer_note(exported, data, str(base)) == f"with the tokeniser of {base}"


def test_a_tokeniser_alone_gets_the_settings_that_load_it(base, exported, tmp_path):
    """transformers would otherwise choose a class by the model, which may make other tokens."""
    (base / "tokenizer_config.json").unlink()
    template = tmp_path / "own.jinja"
    template.write_text("{{ 1 }}")
    data = data_of(tokenizer=str(base), chat_template=str(template), eos_token="<|endoftext|>")
    copy_tokenizer(exported, data, str(exported))
    loaded = AutoTokenizer.from_pretrained(exported)
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == FileTokenizer(base).encode_batch([TEXT])[0].tolist()
    assert (loaded.eos_token, loaded.chat_template) == ("<|endoftext|>", "{{ 1 }}")


def test_other_tokens_than_were_trained_are_told(base, exported):
    """transformers takes its own class for qwen2, which splits numbers into digits; this tokeniser does not."""
    train_byte_pair_tokenizer([" 12: 2048"] * 3, 270, base / "tokenizer.json")
    data = data_of(tokenizer=str(base))
    copy_tokenizer(exported, data, str(base))
    note = exported_tokenizer_note(exported, data, str(base))
    assert "warning: AutoTokenizer takes Qwen2Tokenizer for this kind of model and makes other tokens" in note
    loaded = PreTrainedTokenizerFast.from_pretrained(exported)
    assert (
        loaded("in 2048", add_special_tokens=False)["input_ids"]
        == FileTokenizer(base).encode_batch(["in 2048"])[0].tolist()
    )


def test_an_export_onto_its_own_source_changes_nothing(base):
    before = {file.name: file.read_bytes() for file in base.iterdir()}
    copy_tokenizer(base, data_of(tokenizer=str(base)), str(base))
    assert {file.name: file.read_bytes() for file in base.iterdir()} == before


def with_token(base, *tokens, **settings):
    """More special tokens, and what `tokenizer_config.json` says."""
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(str(base / "tokenizer.json"))
    file = base / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return FileTokenizer(base, tokens[0])


def written(directory, name):
    return json.loads((directory / name).read_text())


@pytest.mark.parametrize(
    ("generation", "generated"),
    [({"eos_token_id": 0, "top_p": 0.5}, "both"), ({"eos_token_id": [0, 5]}, "all"), (None, "one")],
    ids=["one", "several", "no file"],
)
@pytest.mark.parametrize("special_map", [False, True])
def test_the_end_that_was_trained_is_exported_everywhere(base, exported, generation, generated, special_map):
    eos_id = with_token(base, "<stop>").eos_id
    (base / "generation_config.json").unlink()
    if generation is not None:
        (base / "generation_config.json").write_text(json.dumps(generation))
    if special_map:
        (base / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "pad_token": "!"}))
    copy_tokenizer(exported, data_of(tokenizer=str(base), eos_token="<stop>"), str(base))
    loaded = AutoTokenizer.from_pretrained(exported)
    assert (loaded.eos_token, loaded.eos_token_id, loaded.pad_token) == ("<stop>", eos_id, "!")
    assert AutoConfig.from_pretrained(exported).eos_token_id == eos_id
    if generation is None:
        settings = GenerationConfig.from_model_config(AutoConfig.from_pretrained(exported))
    else:
        settings = GenerationConfig.from_pretrained(exported)
    assert settings.eos_token_id == {"both": [eos_id, 0], "all": [eos_id, 0, 5], "one": eos_id}[generated]
    assert settings.top_p == (generation or {}).get("top_p", None)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("setting", [None, False, True])
def test_an_exported_tokeniser_begins_a_text_as_it_was_trained(base, exported, own, setting):
    trained = with_token(base, "<s>", bos_token="<s>")
    if own:
        tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
        bos, end = ("<s>", trained.eos_id), ("<|endoftext|>", 0)
        tokenizer.post_processor = TemplateProcessing("<s> $A <|endoftext|>", special_tokens=[bos, end])
        tokenizer.save(str(base / "tokenizer.json"))
    data = data_of(tokenizer=str(base), prepend_bos=setting)
    copy_tokenizer(exported, data, str(base))
    document = open_encoder(data).encode(("a text",))
    ids = AutoTokenizer.from_pretrained(exported)("a text")["input_ids"]
    assert [*ids, 0][: len(document.tokens)] == document.tokens.tolist()
    assert (ids[-1] == 0) is own, "what the tokeniser writes after a text stays"
    assert (ids[0] == trained.eos_id) is (own if setting is None else setting)
    assert exported_tokenizer_note(exported, data, str(base)) == f"with the tokeniser of {base}"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPT2Tokenizer", {"add_prefix_space": True}),
        ("Qwen2Tokenizer", {}),
        ("BertTokenizer", {"do_lower_case": True}),
        ("GemmaTokenizer", {}),
    ],
)
def test_a_class_that_makes_other_ids_is_refused_with_both_ways_out(base, tmp_path, name, settings):
    write = lambda named: (base / "tokenizer_config.json").write_text(  # noqa: E731
        json.dumps({"tokenizer_class": named, "eos_token": "<|endoftext|>", **settings})
    )
    train_byte_pair_tokenizer([" 12: 2048"] * 3, 270, base / "tokenizer.json")  # Qwen2's class splits numbers
    (base / "tokenizer_config.json").unlink()
    require_same_token_ids(FileTokenizer(base))
    write("PreTrainedTokenizerFast")
    require_same_token_ids(FileTokenizer(base))
    write(name)
    with pytest.raises(ConfigError, match=rf"as {name} .*other ids.*PreTrainedTokenizerFast.*OTHER"):
        require_same_token_ids(FileTokenizer(base))
    if name in ("GPT2Tokenizer", "Qwen2Tokenizer"):  # the vocabulary lacks what the others need to read a text at all
        loaded = AutoTokenizer.from_pretrained(base)
        loaded.save_pretrained(tmp_path / "other")
        other = FileTokenizer(tmp_path / "other")
        require_same_token_ids(other)
        text = f"{TEXT} 2048"
        assert other.encode_batch([text])[0].tolist() == loaded(text, add_special_tokens=False)["input_ids"]
        assert other.encode_batch([text])[0].tolist() != FileTokenizer(base).encode_batch([text])[0].tolist()
