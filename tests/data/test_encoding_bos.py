"""What a tokeniser writes before and after a text itself is written once, as transformers has it."""

import json

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

from chat_cases import MISTRAL, encoder_config, train_chat_tokenizer
from evenload.data.chat_encoding import open_encoder
from evenload.data.tokenize import FileTokenizer
from evenload.errors import ConfigError


def processor_of(name, ids):
    bos, eos = ("<s>", ids["<s>"]), ("</s>", ids["</s>"])
    return {
        "none": None,
        "bytes": processors.ByteLevel(trim_offsets=True),
        "bos": processors.TemplateProcessing("<s> $A", special_tokens=[bos]),
        "both": processors.TemplateProcessing("<s> $A </s>", special_tokens=[bos, eos]),
        "eos": processors.TemplateProcessing("$A </s>", special_tokens=[eos]),
        "sequence": processors.Sequence(
            [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing("<s> $A", special_tokens=[bos])]
        ),
        "bert": processors.BertProcessing(eos, bos),
        "roberta": processors.RobertaProcessing(eos, bos),
    }[name]


WRITES_BOS = ("bos", "both", "sequence", "bert", "roberta")
PROCESSORS = ("none", "bytes", "eos", *WRITES_BOS)


@pytest.fixture
def directory(tmp_path):
    def write(name):
        train_chat_tokenizer(tmp_path)
        tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        ids = {token: tokenizer.token_to_id(token) for token in ("<s>", "</s>")}
        tokenizer.post_processor = processor_of(name, ids)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return write


def encoded(directory, values, **settings):
    encoder = open_encoder(encoder_config(tokenizer=str(directory), **settings))
    return encoder.encode(values), encoder


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("record", ["text", "prompt_completion"])
def test_a_text_begins_as_in_transformers_and_ends_once(directory, name, record):
    root = directory(name)
    values = ("and so",) if record == "text" else ("and", " so")
    document, _ = encoded(root, values, record=record)
    theirs = AutoTokenizer.from_pretrained(root)("and so")["input_ids"]
    eos_id = FileTokenizer(root).eos_id
    assert document.tokens.tolist() == theirs + ([] if theirs[-1] == eos_id else [eos_id])
    assert (int(document.tokens[0]) == FileTokenizer(root).bos_id) is (name in WRITES_BOS)
    if record == "prompt_completion":
        trained = document.labels[document.labels >= 0]
        assert FileTokenizer(root).decode(trained) == " so"
        assert trained[-1] == eos_id
    bare, _ = encoded(root, values, record=record, append_eos=False, prepend_bos=False)
    assert bare.tokens.tolist() == FileTokenizer(root).encode_batch(["and so"])[0].tolist()


@pytest.mark.parametrize("name", ["none", "bos"])
def test_the_setting_goes_before_what_the_tokeniser_does(directory, name):
    root = directory(name)
    bos_id = FileTokenizer(root).bos_id
    names = set()
    for setting, begins in ((True, True), (False, False), (None, name == "bos")):
        document, encoder = encoded(root, ("and so",), prepend_bos=setting)
        assert (int(document.tokens[0]) == bos_id) is begins
        assert document.labels is None, "every token after the first is a label, so the text's first one is too"
        names.add(encoder.name)
    assert len(names) == 2, "what decides tokens is in the name, and nothing else is"


@pytest.mark.parametrize("record", ["text", "prompt_completion"])
def test_what_the_text_spells_itself_is_not_written_again(directory, record):
    root = directory("both")
    values = ("<s>and so</s>",) if record == "text" else ("<s>and", " so</s>")
    document, _ = encoded(root, values, record=record)
    plain, _ = encoded(root, ("and so",))
    assert document.tokens.tolist() == plain.tokens.tolist()
    assert document.tokens.tolist().count(FileTokenizer(root).bos_id) == 1
    empty, _ = encoded(root, ("",) if record == "text" else ("", ""), record=record)
    assert not len(empty.tokens)


@pytest.mark.parametrize("setting", [None, True, False])
def test_a_chat_template_decides_for_chats(directory, setting, tmp_path):
    """With and without a BOS of its own, as `apply_chat_template` has it, which adds nothing."""
    root = directory("bos")
    question, answer = {"role": "user", "content": "and"}, {"role": "assistant", "content": "so"}
    for source in (MISTRAL.plain, MISTRAL.plain.replace("{{ bos_token }}", "")):
        (tmp_path / "own.jinja").write_text(source)
        options = {"chat_template": str(tmp_path / "own.jinja"), "prepend_bos": setting}
        for record, values in (("messages", ([question, answer],)), ("prompt_completion", ([question], [answer]))):
            document, _ = encoded(root, values, record=record, **options)
            their = AutoTokenizer.from_pretrained(root)
            theirs = their.apply_chat_template([question, answer], chat_template=source, return_dict=True)["input_ids"]
            assert document.tokens.tolist() == theirs
            assert (document.labels >= 0).sum() == len(FileTokenizer(root).encode_batch([" so</s>"])[0])


def test_a_token_that_nobody_names_is_asked_for(directory, tmp_path):
    root = directory("none")
    (root / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"prepend_bos is on.*bos_token in tokenizer_config\.json"):
        open_encoder(encoder_config(tokenizer=str(root), prepend_bos=True, eos_token="</s>"))
    with pytest.raises(ConfigError, match="prepend_bos"):
        open_encoder(encoder_config(tokenizer="bytes", prepend_bos=True))
