"""Which tokeniser a run uses, and what is refused before any process starts."""

from pathlib import Path

import pytest

from evenload.cli.worker_setup import require_runnable
from evenload.config.tokenizer import require_tokenizer, run_tokenizer_text
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.errors import ConfigError
from reference_training import tiny_config

VOCABULARY = 330


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A model directory of `VOCABULARY` ids, a document, and a configuration for pretrained weights."""
    tiny_config("llama", vocab_size=VOCABULARY).save_pretrained(tmp_path / "model")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("a document")
    (tmp_path / "config.toml").write_text(
        f"""
        [model]
        path = "{tmp_path / "model"}"
        [data]
        sources = ["{tmp_path / "corpus"}"]
        max_document_tokens = 64
        batch_documents = 1
        [train]
        output_dir = "{tmp_path / "run"}"
        steps = 1
        """
    )
    return tmp_path


def add_tokenizer(directory: Path, vocab_size: int = 270) -> None:
    texts = [" ".join(f"{a}{b}{a}" for a in "abcdefgh" for b in "ijklmnop")] * 2
    train_byte_pair_tokenizer(texts, vocab_size, directory / "tokenizer.json")


def configured(project: Path, *overrides: str) -> TrainConfig:
    return load_train_config(project / "config.toml", list(overrides))


def opened(config: TrainConfig):
    config = config.with_found_kinds()
    return require_tokenizer(config.data, config.model.pretrained, VOCABULARY)


@pytest.mark.parametrize("path", ["model", "model/config.json"])
@pytest.mark.parametrize("random_init", ["true", "false"])
def test_the_default_is_the_model_directorys_tokeniser(project, path, random_init):
    add_tokenizer(project / "model")
    config = configured(project, f"model.path={project / path}", f"model.random_init={random_init}")
    assert config.data.tokenizer == str(project / "model")
    tokenizer = opened(config)
    assert tokenizer.vocab_size == 270
    assert (
        run_tokenizer_text(config.data, tokenizer, VOCABULARY)
        == f"{project / 'model' / 'tokenizer.json'} (BPE, 270 ids)"
    )


def test_a_configured_tokeniser_goes_before_the_models(project):
    add_tokenizer(project / "model")
    add_tokenizer(project / "other", 260)
    assert opened(configured(project, f"data.tokenizer={project / 'other'}")).vocab_size == 260
    assert opened(configured(project, "data.tokenizer=bytes", "model.random_init=true")).name == "bytes"


def test_random_weights_without_a_tokeniser_train_on_bytes_and_say_so(project):
    config = configured(project, "model.random_init=true")
    fact = run_tokenizer_text(config.data, opened(config), VOCABULARY)
    assert fact == "plain bytes and an end of document, 257 ids"


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ([], "data.tokenizer is not set and .*model holds no tokenizer.json"),
        (["data.tokenizer=bytes"], 'data.tokenizer is "bytes"'),
    ],
)
def test_pretrained_weights_are_never_trained_on_bytes(project, setting, cause):
    with pytest.raises(ConfigError, match=f"{cause}, so pretrained .* vocabulary of 330 ids .* set data.tokenizer to"):
        require_runnable(configured(project, *setting))


def test_token_ids_need_no_tokeniser(project):
    config = configured(project, "data.record=tokens")
    assert run_tokenizer_text(config.data, opened(config), 330) == (
        "none: records hold token ids, checked against the model's vocabulary of 330"
    )
    add_tokenizer(project / "model")
    assert configured(project, "data.record=tokens").data.tokenizer is None, "its size would be a limit of ids"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, r"tokenizer '.*missing\.json' is not a file"),
        ("config.toml", None, r"config\.toml' is not a tokenizer\.json that tokenizers can read"),
        ("empty", "", r"tokenizer '.*empty' is not a file"),
    ],
)
def test_a_wrong_tokeniser_is_refused_before_processes_start(project, name, content, message):
    if content is not None:
        (project / name).mkdir()
    with pytest.raises(ConfigError, match=message):
        require_runnable(configured(project, f"data.tokenizer={project / name}"))


def test_a_tokeniser_larger_than_the_models_vocabulary_is_refused(project):
    add_tokenizer(project / "model", 340)
    with pytest.raises(ConfigError, match=r"tokenizer\.json \(BPE, 3\d\d ids\) makes ids .* vocab_size is 330"):
        require_runnable(configured(project))
