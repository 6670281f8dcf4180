import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from evenload.data.tokenize import ByteTokenizer, FileTokenizer, open_tokenizer, required_eos, train_byte_pair_tokenizer
from evenload.errors import ConfigError

TEXTS = ["def add(a, b):\n    return a + b\n", "the cat sat on the mat", "naïve café 三 😀"] * 20


@given(st.text())
def test_byte_tokens_are_the_utf8_bytes(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode_batch([text])[0]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(np.append(tokens, tokenizer.eos_id)) == text
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (256, 257)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    return path, train_byte_pair_tokenizer(TEXTS, 300, path)


def test_trained_tokenizer_round_trips_through_its_file(trained):
    path, tokenizer = trained
    for again in (FileTokenizer(path), FileTokenizer(path.parent)):
        for text in [*TEXTS[:3], " leading space", "\n\t", "bytes \x00 ÿ"]:
            tokens = again.encode_batch([text])[0]
            assert tokens.dtype == np.int32
            assert tokens.tolist() == tokenizer.encode_batch([text])[0].tolist()
            assert again.decode(tokens) == text
            assert tokens.min() >= 0
            assert tokens.max() < again.vocab_size
        assert again.name == tokenizer.name
    assert len(tokenizer.encode_batch([TEXTS[0]])[0]) < len(TEXTS[0].encode())
    assert tokenizer.vocab_size <= 300
    assert required_eos(tokenizer) == tokenizer.special_tokens()["<|endoftext|>"]


def test_training_is_the_same_in_another_process(trained, tmp_path):
    """Ranks and resumed runs may each train it; hash order must not show."""
    path, _ = trained
    code = (
        "import sys; from evenload.data.tokenize import train_byte_pair_tokenizer as train;"
        "import json; train(json.loads(sys.argv[1]), 300, sys.argv[2])"
    )
    other = tmp_path / "new_directory" / "tokenizer.json"
    subprocess.run([sys.executable, "-c", code, json.dumps(TEXTS), str(other)], check=True)
    assert other.read_bytes() == path.read_bytes()


def test_truncation_and_padding_inside_the_file_are_switched_off(trained, tmp_path):
    """Many published files carry max_length 512, which would cut documents without a word."""
    tokenizer = tokenizers.Tokenizer.from_file(str(trained[0]))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (
        FileTokenizer(tmp_path).encode_batch([TEXTS[1]])[0].tolist() == trained[1].encode_batch([TEXTS[1]])[0].tolist()
    )


def write_variant(trained, tmp_path, token, config=None):
    content = trained[0].read_text().replace("<|endoftext|>", token)
    (tmp_path / "tokenizer.json").write_text(content)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("config", [{"eos_token": "<stop>"}, {"eos_token": {"content": "<stop>", "lstrip": False}}])
def test_end_token_comes_from_the_config_beside_the_file(trained, tmp_path, config):
    tokenizer = FileTokenizer(write_variant(trained, tmp_path, "<stop>", config))
    assert required_eos(tokenizer) == tokenizer.special_tokens()["<stop>"]


def test_end_token_can_be_set_and_is_asked_for_when_unknown(trained, tmp_path):
    path = str(write_variant(trained, tmp_path, "<stop>"))
    with pytest.raises(ConfigError, match=r"<stop>.*data\.eos_token"):
        required_eos(open_tokenizer(path))
    assert required_eos(open_tokenizer(path, "<stop>")) == 0
    with pytest.raises(ConfigError, match=r"'<halt>' is not in"):
        open_tokenizer(path, "<halt>")
    with pytest.raises(ConfigError, match="bytes"):
        open_tokenizer("bytes", "<stop>")


def test_missing_or_foreign_files_and_too_small_vocabularies_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing"):
        open_tokenizer(str(tmp_path / "nothing.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"256.*257"):
        train_byte_pair_tokenizer(TEXTS, 256, tmp_path / "tokenizer.json")
