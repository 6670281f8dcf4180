"""Names on the Hugging Face Hub, with a cache that somebody filled and without a network."""

import json

import huggingface_hub.constants
import numpy as np
import pytest

import evenload
from evenload.config.train_config import read_train_config
from evenload.data.chat_encoding import open_encoder
from evenload.data.config import DataConfig
from evenload.data.hub import is_hub_name, local_path, model_from
from evenload.data.tokenize import open_tokenizer, train_byte_pair_tokenizer
from evenload.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The Hub's cache with one model, whose weights are not there, as the client lays it out; no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub" / "models--some-org--small"
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    train_byte_pair_tokenizer(["some text", "and some more"], 300, folder / "tokenizer.json")
    return folder


def test_a_model_in_the_cache_is_planned_and_read_by_its_name(cache):
    assert local_path("some-org/small", "model.path") == str(cache)
    assert local_path(f"some-org/small@{COMMIT}", "model.path") == str(cache)
    assert model_from("some-org/small").name == "some-org/small"
    result = evenload.plan(np.full(8, 50), model="some-org/small", cluster="h100x2", documents=4, strategy="best_fit")
    assert result.inputs["model"] == "some-org/small"
    assert open_tokenizer("some-org/small").path == cache / "tokenizer.json"
    tree = {
        "model": {"path": "some-org/small"},
        "data": {"sources": ["nowhere"], "max_document_tokens": 10, "batch_documents": 1},
        "train": {"output_dir": "run", "steps": 1},
    }
    assert read_train_config(tree).data.tokenizer == "some-org/small", "the settings name no folder of this machine"


def test_a_tokenizer_without_its_settings_is_taken_with_a_warning(cache, caplog):
    """The Hub would be asked for them first; which token ends a document is a guess without."""
    assert local_path("some-org/small", "data.tokenizer", "tokenizer") == str(cache)
    assert f"'some-org/small' (revision {COMMIT}) has no tokenizer_config.json" in caplog.text
    assert "set data.eos_token" in caplog.text
    caplog.clear()
    (cache / "tokenizer_config.json").write_text("{}")
    assert local_path("some-org/small", "data.tokenizer", "tokenizer") == str(cache)
    assert "tokenizer_config" not in caplog.text


def test_chats_take_the_template_of_a_tokeniser_on_the_hub(cache):
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{% for one in messages %}{{ one.content }}{% endfor %}"}
    (cache / "tokenizer_config.json").write_text(json.dumps(settings))
    data = DataConfig(
        sources=("chats",), record="messages", loss_on="all", tokenizer="some-org/small", batch_documents=1,
        max_document_tokens=64,
    )  # fmt: skip
    (document,) = open_encoder(data).encode_many([([{"role": "user", "content": "some text"}], None)])
    assert open_tokenizer("some-org/small").decode(document.tokens) == "some text"


@pytest.mark.parametrize(
    ("name", "wanted", "lacks"),
    [
        ("some-org/small", "weights", "with its weights, and cannot be downloaded"),
        ("some-org/other", "settings", "with its settings, and cannot"),
        ("some-org/small@v2", "tokenizer", "with its tokenizer, and cannot"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_is_not_there_is_said_with_what_to_do(name, wanted, lacks):
    with pytest.raises(ConfigError) as refused:
        local_path(name, "model.path", wanted)
    words = str(refused.value)
    repository, _, revision = name.partition("@")
    for part in (f"model.path '{name}' is no file or folder here", lacks, f"hf download {repository}", "set HF_HOME"):
        assert part in words
    assert (f"--revision {revision}" in words) == bool(revision)


def test_paths_stay_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    paths = "models/small", "models/smal", "nowhere", "a/b/c", "a/config.json", "/a/b", "./a/b", "../a", "run.toml"
    for path in paths:
        assert not is_hub_name(path), path
        assert local_path(path, "model.path") == path
    assert is_hub_name("some-org/small")
    assert is_hub_name("Qwen/Qwen3-0.6B@main")
    with pytest.raises(ConfigError, match=r"is no built-in name and no config\.json"):
        model_from("models/smal")
