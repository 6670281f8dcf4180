"""Kind "text", what `open_encoder` refuses, and where a chat template and its tokens come from."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_cases import CHATML, LLAMA, MISTRAL, chat, chat_encoder, encoder_config, train_chat_tokenizer
from evenload.data.chat_encoding import open_chat_template, open_encoder
from evenload.data.encoders import RecordProblem
from evenload.data.tokenize import FileTokenizer, open_tokenizer, train_byte_pair_tokenizer
from evenload.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizer")
    train_chat_tokenizer(root)
    return root / "tokenizer.json"


@pytest.fixture
def model(tokenizer_file, tmp_path):
    def write(files):
        (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
        for name, content in files.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(tmp_path)

    return write


@settings(deadline=None)
@given(st.lists(st.text(max_size=20), max_size=5), st.booleans())
def test_texts_are_their_tokens_and_the_end(tokenizer_file, texts, append_eos):
    for name, eos in (("bytes", None), (str(tokenizer_file), "</s>")):
        encoder = open_encoder(encoder_config(tokenizer=name, eos_token=eos, append_eos=append_eos))
        tokenizer = open_tokenizer(name, eos)
        documents = encoder.encode_many([(text,) for text in texts])
        for text, document in zip(texts, documents, strict=True):
            expected = tokenizer.encode_batch([text])[0].tolist()
            expected += [tokenizer.eos_id] if expected and append_eos else []
            assert document.tokens.tolist() == expected == encoder.encode((text,)).tokens.tolist()
            assert document.tokens.dtype == "int32"
            assert document.labels is None


@pytest.mark.parametrize("name", ["bytes", "file"])
@pytest.mark.parametrize(
    ("value", "what"), [(None, "'text' holds nothing"), (3, "type int"), ("a\ud800", "pair at character 1")]
)
def test_values_that_are_no_text_are_told_apart(tokenizer_file, name, value, what):
    name = name if name == "bytes" else str(tokenizer_file)
    encoder = open_encoder(encoder_config(tokenizer=name, append_eos=False))
    for encode in (lambda: encoder.encode((value,)), lambda: encoder.encode_many([("good",), (value,)])):
        with pytest.raises(RecordProblem, match=what):
            encode()


def test_offsets_do_not_depend_on_what_a_file_does_after_tokenising(tokenizer_file):
    """Published files cut white space out of offsets, so a space would belong to no token."""
    text = "and so  三 😀\n\n and"
    (result,) = FileTokenizer(tokenizer_file).encode_with_offsets([text])
    covered = {character for start, stop in result.offsets.tolist() for character in range(start, stop)}
    assert covered == set(range(len(text)))
    (exact,) = FileTokenizer(tokenizer_file.parent / "exact.json").encode_with_offsets([text])
    assert exact.offsets.tolist() == result.offsets.tolist()
    assert (
        exact.tokens.tolist()
        == result.tokens.tolist()
        == FileTokenizer(tokenizer_file).encode_batch([text])[0].tolist()
    )


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"loss_on": "completion"}, r"loss_on.*record.*prompt_completion"),
        ({"labels_column": "labels"}, r"labels_column is 'labels'.*\"text\""),
        ({"record": "messages", "labels_column": "labels"}, "labels_column"),
        ({"record": "tokens", "loss_on": "completion"}, r"loss_on.*labels_column"),
        ({"record": "tokens", "loss_on": "all", "labels_column": "labels"}, r"loss_on.*labels_column"),
        ({"record": "messages", "format": "text"}, r"data\.format"),
        ({"format": "memmap"}, r"data\.record to \"tokens\""),
        ({"record": "messages"}, r"bytes.*no chat template.*data\.chat_template"),
        ({"record": "messages", "chat_template": "nowhere.jinja"}, r"nowhere\.jinja.*cannot be read"),
        ({"record": "prompt_completion", "chat_template": "nowhere.jinja"}, r"nowhere\.jinja.*cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_the_start(settings, what):
    with pytest.raises(ConfigError, match=what):
        open_encoder(encoder_config(**settings))


@pytest.mark.parametrize("record", ["text", "prompt_completion", "messages"])
def test_only_records_that_get_an_end_token_need_one(model, record):
    path = model({"chat_template.jinja": CHATML.plain, "tokenizer_config.json": {"eos_token": None}})
    tokenizer = FileTokenizer(path)
    tokenizer.eos_id = None
    if record != "messages":
        with pytest.raises(ConfigError, match="append_eos"):
            open_encoder(encoder_config(record=record, tokenizer=path), tokenizer)
    open_encoder(encoder_config(record=record, tokenizer=path, append_eos=record == "messages"), tokenizer)


NAMED = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages }}"}]


def template_of(path, **settings):
    config = encoder_config(record="messages", tokenizer=path, **settings)
    return open_chat_template(config, open_tokenizer(path, config.eos_token))


def test_templates_are_looked_up_in_the_order_of_transformers(model, tmp_path):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": MISTRAL.plain}
    path = model({"tokenizer_config.json": config})
    assert template_of(path).source == MISTRAL.plain
    assert template_of(path + "/tokenizer.json").source == MISTRAL.plain
    model({"chat_template.jinja": CHATML.plain})
    assert template_of(path).source == CHATML.plain
    (tmp_path / "own.txt").write_text(LLAMA.plain)
    assert template_of(path, chat_template=str(tmp_path / "own.txt")).source == LLAMA.plain
    (tmp_path / "chat_template.jinja").unlink()
    assert template_of(model({"tokenizer_config.json": {"chat_template": NAMED}})).source == "{{ messages }}"


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({}, r"no chat template.*data\.chat_template"),
        ({"tokenizer_config.json": {"chat_template": 3}}, "type int, must be text"),
        ({"tokenizer_config.json": {"chat_template": NAMED[:1]}}, r"\['tool_use'\] and no default"),
        ({"tokenizer_config.json": "[1]"}, "not a JSON object"),
        ({"chat_template.jinja": "{{ a"}, "line 1"),
        ({"chat_template.jinja": LLAMA.plain}, r"writes bos_token.*null = nothing"),
        ({"chat_template.jinja": LLAMA.plain, "tokenizer_config.json": {"eos_token": "</s>"}}, "writes bos_token"),
    ],
)
def test_templates_that_are_missing_or_broken_are_named(model, files, what):
    path = model(files)
    with pytest.raises(ConfigError, match=what):
        open_encoder(encoder_config(record="messages", tokenizer=path))


def test_special_tokens_come_from_the_files_beside_the_tokenizer(model):
    source = "{{ bos_token }}|{{ eos_token }}|{{ image_token }}"
    path = model(
        {
            "chat_template.jinja": source,
            "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>"},
            "tokenizer_config.json": {"eos_token": {"content": "<never>"}, "image_token": "<i>", "add_bos_token": True},
        }
    )
    assert template_of(path).render(chat("a")) == "<s>|</s>|<i>"
    assert template_of(path, eos_token="<|im_end|>").render(chat("a")) == "<s>|<|im_end|>|<i>"
    model({"tokenizer_config.json": {"bos_token": None, "eos_token": None}, "special_tokens_map.json": {}})
    assert template_of(path).render(chat("a")) == "||"


def test_the_one_usual_end_token_of_a_bare_file_is_the_templates_too(tmp_path):
    train_byte_pair_tokenizer(["a"], 257, tmp_path / "tokenizer.json")
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    assert template_of(str(tmp_path)).render(chat("a")) == "<|endoftext|>"


def test_bytes_have_no_special_tokens_to_write(tmp_path):
    with pytest.raises(ConfigError, match="writes bos_token, eos_token, but bytes have no such tokens"):
        chat_encoder(tmp_path, MISTRAL.plain)


@pytest.mark.parametrize("record", ["text", "messages", "prompt_completion", "tokens"])
def test_every_encoder_can_go_to_another_process(tmp_path, record):
    encoder = chat_encoder(tmp_path, CHATML.plain, record=record)
    (tmp_path / "template.jinja").unlink()
    again = pickle.loads(pickle.dumps(encoder))
    values = {"messages": (chat("a", "b"),), "prompt_completion": ("a", "b"), "tokens": (np.array([1, 2], np.int32),)}
    values = values.get(record, ("a",))
    assert again.encode(values).tokens.tolist() == encoder.encode(values).tokens.tolist()
    assert (again.name, again.columns) == (encoder.name, encoder.columns)
