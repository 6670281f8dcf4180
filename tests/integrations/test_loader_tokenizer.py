"""`PackedLoader` names its tokeniser, and checks ids against the caller's own model."""

import json

import pytest

from evenload import PackedLoader
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.errors import ConfigError, DataError
from packed_cases import loader_of, write_texts
from reference_training import tiny_config


def tokenizer_line(loader: PackedLoader) -> str:
    (line,) = (line for line in loader.start_lines if line.startswith("tokenizer"))
    return line.removeprefix("tokenizer").strip()


def test_the_first_lines_name_the_tokeniser(tmp_path):
    write_texts(tmp_path)
    assert tokenizer_line(loader_of(tmp_path)) == (
        "plain bytes and an end of document, 257 ids, because none was given"
    )
    assert tokenizer_line(loader_of(tmp_path, tokenizer="bytes")) == "plain bytes and an end of document, 257 ids"
    file = tmp_path / "own" / "tokenizer.json"
    train_byte_pair_tokenizer(["a text"], 258, file)
    assert tokenizer_line(loader_of(tmp_path, tokenizer=file.parent)) == f"{file} (BPE, 258 ids)"


def test_one_of_transformers_is_called_what_its_caller_loaded(tmp_path):
    from transformers import PreTrainedTokenizerFast

    write_texts(tmp_path)
    train_byte_pair_tokenizer(["a text"], 258, tmp_path / "own" / "tokenizer.json")
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "own" / "tokenizer.json"), eos_token="<|endoftext|>", name_or_path="hub/model"
    )
    assert tokenizer_line(loader_of(tmp_path, tokenizer=fast)) == "hub/model (BPE, 258 ids)"


def test_bytes_nobody_asked_for_are_refused_for_a_model_of_the_callers(tmp_path):
    write_texts(tmp_path)
    model = tiny_config("llama", vocab_size=1000)
    with pytest.raises(ConfigError, match="tokenizer is not given, and the model's vocabulary of 1,000 ids"):
        loader_of(tmp_path, model=model)
    loader_of(tmp_path, model=model, tokenizer="bytes")
    loader_of(tmp_path, model=tiny_config("llama", vocab_size=257))
    with pytest.raises(ConfigError, match="makes ids that the model has no embedding for: its vocab_size is 97"):
        loader_of(tmp_path, model=tiny_config("llama", vocab_size=97), tokenizer="bytes")


def test_ids_beyond_the_callers_model_are_named_by_file_and_line(tmp_path):
    rows = [[1, 2, 3], [4, 96], [5, 97, 6], [7, 8]]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    settings = {"record": "tokens", "model": tiny_config("llama", vocab_size=97), "epochs": 1}
    with pytest.raises(DataError, match=r"ids\.jsonl.*3.*column 'input_ids' holds 97, must be .* the vocabulary's 97"):
        list(loader_of(tmp_path, **settings))
    skipping = loader_of(tmp_path, **settings, on_corrupt="skip")
    assert tokenizer_line(skipping) == "none: records hold token ids, checked to be below 97"
    list(skipping)
    assert any("corrupt" in line and " 1 " in line for line in skipping.ledger_lines), skipping.ledger_lines
    by_name = loader_of(tmp_path, **(settings | {"model": "llama-7b"}))
    assert tokenizer_line(by_name) == "none: records hold token ids, not checked, as the model is not known"
    list(by_name)
