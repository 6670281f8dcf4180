"""Templates that do not teach the assistant to stop are told before training."""

import json
import logging

import pytest
import tokenizers

from chat_cases import CHATML, TEMPLATES, chat, encoder_config, train_chat_tokenizer
from evenload import PackedLoader
from evenload.data.chat_encoding import stop_warnings
from evenload.data.tokenize import ByteTokenizer, FileTokenizer
from evenload.errors import ConfigError

OUTSIDE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"
    "{% endfor %}"
)
NO_TOKEN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def directory(tmp_path):
    train_chat_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return tmp_path


def warnings_of(directory, source, model_ends=None, **settings):
    (directory / "chat.jinja").write_text(source)
    options = {"record": "messages", "tokenizer": str(directory), "chat_template": str(directory / "chat.jinja")}
    config = encoder_config(**options | settings)
    return stop_warnings(config, FileTokenizer(directory, config.eos_token), model_ends)


@pytest.mark.parametrize("record", ["messages", "prompt_completion"])
@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("case", TEMPLATES, ids=lambda case: case.name)
def test_the_token_that_a_template_ends_with_must_end_generation(directory, case, tagged, record):
    source = case.tagged if tagged else case.plain
    assert warnings_of(directory, source, record=record, eos_token=case.eos) == []
    other = "<|endoftext|>"
    if case.name == "mistral":  # writes whatever eos_token is
        assert warnings_of(directory, source, record=record, eos_token=other) == []
        return
    (warning,) = warnings_of(directory, source, record=record, eos_token=other)
    assert f"none of the tokens with which generation ends ('{other}')" in warning
    assert f"set data.eos_token to the special token that the template writes there ({case.eos})" in warning


@pytest.mark.parametrize(
    ("source", "settings", "fix"),
    [
        (NO_TOKEN, {}, "(it writes none)"),
        (NO_TOKEN, {"loss_on": "all"}, "(it writes none)"),
        (OUTSIDE, {"eos_token": "<|im_end|>"}, "inside its {% generation %} block"),
        (OUTSIDE, {"eos_token": "<|im_end|>", "loss_on": "all"}, None),
    ],
)
def test_a_template_without_any_token_in_what_is_taught_is_told(directory, source, settings, fix):
    warnings = warnings_of(directory, source, **settings)
    assert len(warnings) == (fix is not None)
    assert all(fix in warning for warning in warnings)


@pytest.mark.parametrize("form", [int, lambda index: [1, index], lambda index: (index,)])
def test_what_ends_the_models_generation_counts_too(directory, form):
    index = FileTokenizer(directory).special_tokens()["<|im_end|>"]
    assert len(warnings_of(directory, CHATML.plain)) == 1
    assert warnings_of(directory, CHATML.plain, form(index)) == []


def test_nothing_is_said_where_nothing_can_be_told(directory):
    assert stop_warnings(encoder_config(record="text"), FileTokenizer(directory)) == []
    assert warnings_of(directory, "{{ raise_exception('only tools') }}") == []
    (directory / "chat.jinja").write_text(CHATML.plain)
    config = encoder_config(record="messages", chat_template=str(directory / "chat.jinja"))
    assert stop_warnings(config, ByteTokenizer()) == []
    strings = encoder_config(record="prompt_completion", tokenizer=str(directory))
    assert stop_warnings(strings, FileTokenizer(directory)) == []


def test_a_loader_says_both_what_does_not_stop_and_what_teaches_nothing(directory, caplog):
    rows = [{"messages": chat("q", "a")}, {"messages": chat("only a question")}] * 2
    (directory / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "chat.jinja").write_text(CHATML.plain)
    options = {"record": "messages", "chat_template": str(directory / "chat.jinja"), "workers": 0, "epochs": 1}
    options |= {"tokenizer": str(directory), "max_tokens": 256, "batch_documents": 4}
    with caplog.at_level(logging.WARNING), PackedLoader(str(directory / "rows.jsonl"), **options) as loader:
        assert "none of the tokens with which generation ends ('</s>')" in caplog.text
        assert len(list(loader.steps())) == 1
        lines = loader.ledger_lines
    assert "2 of the first 4 documents have no token with a loss and teach nothing, such as number" in caplog.text
    assert "rows.jsonl" in caplog.text
    assert any("2 of these documents taught nothing" in line for line in lines)


def test_a_loader_refuses_settings_that_change_ids(directory):
    (directory / "text.txt").write_text("a text")
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "add_prefix_space": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    options = {"tokenizer": str(directory), "max_tokens": 256, "batch_documents": 1, "workers": 0}
    with pytest.raises(ConfigError, match=r"GPT2Tokenizer .*makes other ids"):
        PackedLoader(str(directory / "text.txt"), **options)


def test_a_tokeniser_that_writes_nothing_itself_need_not_take_every_text(directory):
    empty = tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="?"))
    empty.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").unlink()
    assert FileTokenizer(directory).opening_ids == ()
