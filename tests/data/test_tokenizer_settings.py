"""Files beside a tokenizer.json change ids as they do in transformers."""

import json

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from evenload.data.tokenize import FileTokenizer, train_byte_pair_tokenizer
from evenload.errors import ConfigError

TOKENS = ("<tool_call>", "<think>", "<|im_end|>", "<|image|>", "cat", "<|endoftext|>", "[A]")
TEXT = " the cat <tool_call>sat<think>\n  <|im_end|> on <|image|> mats<|endoftext|>x [A] <CLS>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("beside")
    train_byte_pair_tokenizer(["the cat sat on the mat"] * 20, 280, root / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(str(root / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken("[A]", rstrip=True)])
    tokenizer.save(str(root / "tokenizer.json"))
    return root


FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def opened(directory, config=None, special=None, added=None):
    for name, content in zip(FILES, (config, special, added), strict=True):
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    theirs = AutoTokenizer.from_pretrained(directory)
    ours = FileTokenizer(directory)
    assert ours.vocab_size == 1 + max(theirs.get_vocab().values())
    assert ours.eos_id == theirs.eos_token_id or theirs.eos_token_id is None
    assert ours.bos_id == theirs.bos_token_id
    return ours, ours.encode_batch([TEXT])[0].tolist(), theirs(TEXT, add_special_tokens=False)["input_ids"]


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ADDED = {"content": "<tool_call>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


@pytest.mark.parametrize(
    "files",
    [
        {"config": FAST | {"added_tokens_decoder": {"281": ADDED | {"special": False}}}},
        {"config": FAST | {"added_tokens_decoder": {"900": ADDED | {"special": True, "lstrip": True}}}},
        {"config": FAST | {"added_tokens_decoder": {"0": ADDED | {"content": "[A]", "special": True}}}},
        {"config": FAST, "added": {"<tool_call>": 281, "<think>": 282}},
        {"config": FAST, "special": {"additional_special_tokens": ["<tool_call>"], "cls_token": "<CLS>"}},
        {"config": FAST | {"bos_token": "<think>", "image_token": "<|image|>"}},
        {"config": FAST | {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": True}}},
        {"config": FAST | {"extra_special_tokens": {"image_token": "<|image|>"}}},
        {"config": FAST | {"additional_special_tokens": ["<think>"], "split_special_tokens": True}},
        {"config": FAST, "special": {"eos_token": {"content": "<|im_end|>", "rstrip": True}}},
    ],
    ids=[
        "decoder", "another id and flags", "other flags of a known token", "added_tokens", "special map", "named",
        "object", "named extra", "split", "map object",
    ],
)  # fmt: skip
def test_tokens_that_other_files_add_have_the_ids_of_transformers(directory, files):
    plain = opened(directory)[0]
    ours, got, expected = opened(directory, **files)
    assert got == expected
    assert got != plain.encode_batch([TEXT])[0].tolist(), "the files change nothing, so nothing is tested"
    assert ours.name != plain.name


flags = st.fixed_dictionaries(
    {}, optional={name: st.booleans() for name in ("lstrip", "rstrip", "normalized", "special")}
)
texts = st.sampled_from(TOKENS)
objects = st.builds(lambda text, options: {"__type": "AddedToken", "content": text, **options}, texts, flags)
lists = st.lists(texts, unique=True, max_size=3)
names = st.sampled_from(("bos_token", "eos_token", "pad_token", "cls_token", "image_token"))
configs = st.fixed_dictionaries(
    {},
    optional={
        "added_tokens_decoder": st.dictionaries(
            st.integers(0, 300).map(str), st.builds(lambda t, f: {"content": t, **f}, texts, flags), max_size=3
        ),
        "extra_special_tokens": lists | st.lists(objects, max_size=2),
        "additional_special_tokens": lists,
        "split_special_tokens": st.booleans(),
        "clean_up_tokenization_spaces": st.booleans(),
        "add_bos_token": st.booleans(),
        "add_prefix_space": st.booleans(),
        "do_lower_case": st.booleans(),
    },
)
special_maps = st.none() | st.builds(
    lambda named, extra: named | extra,
    st.dictionaries(names, texts | st.builds(lambda t: {"content": t, "lstrip": True}, texts), max_size=3),
    st.fixed_dictionaries({}, optional={"additional_special_tokens": lists, "extra_special_tokens": lists}),
)
added_files = st.none() | st.dictionaries(texts, st.integers(270, 300), max_size=3)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configs, st.dictionaries(names, texts | objects, max_size=3), special_maps, added_files)
def test_any_settings_give_the_ids_of_transformers(directory, config, named, special, added):
    _, got, expected = opened(directory, FAST | config | named, special, added)
    assert got == expected


@pytest.mark.parametrize("token", [3, {"lstrip": True}])
def test_tokens_that_are_none_are_told(directory, token):
    opened(directory, FAST)
    (directory / "tokenizer_config.json").write_text(json.dumps(FAST | {"extra_special_tokens": [token]}))
    with pytest.raises(ConfigError, match="must be a token: text or an object with content"):
        FileTokenizer(directory)
