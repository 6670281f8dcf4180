import json

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from chat_cases import CHATML, chat, chat_encoder, encoder_config, train_chat_tokenizer
from evenload.data.chat_encoding import open_encoder
from evenload.data.encoders import RecordProblem
from evenload.data.tokenize import ByteTokenizer, FileTokenizer

texts = st.text(alphabet=st.sampled_from("anod \n三😀"), max_size=8)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("prompts")
    train_chat_tokenizer(root)
    (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"}))
    return root


@pytest.fixture(scope="module")
def tokenizer(directory):
    return FileTokenizer(directory)


@pytest.fixture(scope="module")
def encoder(directory):
    return open_encoder(encoder_config(record="prompt_completion", tokenizer=str(directory)))


def trl_encoding(tokenizer, prompt, completion):
    """As TRL: the prompt's tokens counted off from those of both; None where they do not begin the whole."""
    if not completion.endswith("</s>"):
        completion += "</s>"
    whole = tokenizer.encode_batch([prompt + completion])[0].tolist()
    before = tokenizer.encode_batch([prompt])[0].tolist()
    if whole[: len(before)] != before:
        return None
    labels = [-100] * len(before) + whole[len(before) :]
    return whole, [-100, *labels[1:]]


@settings(deadline=None)
@given(texts, texts, st.booleans())
def test_completions_are_labels_as_in_trl(tokenizer, encoder, prompt, completion, has_end):
    completion += "</s>" if has_end else ""
    document = encoder.encode((prompt, completion))
    if not prompt + completion:
        assert len(document.tokens) == len(document.labels) == 0
        return
    expected = trl_encoding(tokenizer, prompt, completion)
    if expected is not None:
        assert (document.tokens.tolist(), document.labels.tolist()) == expected
    assert (
        tokenizer.encode_batch([prompt + completion])[0].tolist()
        == document.tokens[: len(document.tokens) - (not has_end)].tolist()
    )
    assert document.tokens[-1] == tokenizer.eos_id
    assert set(document.labels[document.labels != document.tokens].tolist()) <= {-100}


def test_a_token_over_the_border_is_prompt(tokenizer, encoder):
    """TRL warns there and counts tokens of another split; the loss must not reach into the prompt."""
    prompt, completion = find(st.tuples(texts, texts), lambda pair: trl_encoding(tokenizer, *pair) is None)
    for texts_of in ((prompt, completion), ("and so\n", "\n")):
        document = encoder.encode(texts_of)
        (result,) = tokenizer.encode_with_offsets(["".join(texts_of)])
        border = len(texts_of[0])
        assert any(start < border < stop for start, stop in result.offsets.tolist())
        begins = result.offsets[:, 0] >= border
        assert (document.labels[1:-1] >= 0).tolist() == begins[1:].tolist()


def test_without_end_token_or_mask_the_text_is_taken_as_it_stands(directory, tokenizer):
    settings = {"record": "prompt_completion", "tokenizer": str(directory)}
    bare = open_encoder(encoder_config(append_eos=False, **settings)).encode(("and", " so"))
    assert bare.tokens.tolist() == tokenizer.encode_batch(["and so"])[0].tolist()
    every = open_encoder(encoder_config(loss_on="all", **settings)).encode(("and", " so"))
    assert every.labels is None
    assert every.tokens.tolist() == [*bare.tokens, tokenizer.eos_id]
    empty = open_encoder(encoder_config(**settings)).encode(("and so", ""))
    assert empty.labels[empty.labels >= 0].tolist() == [tokenizer.eos_id]


@settings(deadline=None)
@given(texts, texts)
def test_bytes_have_an_exact_border(prompt, completion):
    document = open_encoder(encoder_config(record="prompt_completion")).encode((prompt, completion))
    border = len(prompt.encode())
    expected = [*completion.encode(), 256] if prompt + completion else []
    if not prompt:
        expected[:1] = [-100] * len(expected[:1])  # nothing stands before the first token to predict it from
    assert document.labels[border:].tolist() == expected
    assert (document.labels[:border] == -100).all()


def test_lists_of_messages_go_through_the_template(directory):
    encoder = chat_encoder(directory, CHATML.plain, record="prompt_completion")
    *prompt, answer, question, last = chat("a", "b", "c", "d", system="s")
    decode = ByteTokenizer().decode
    one = encoder.encode(([*prompt, answer, question], [last]))
    assert decode(one.labels[one.labels >= 0]) == "d<|im_end|>\n"
    several = encoder.encode((prompt, [answer, question, last]))
    assert several.tokens.tolist() == one.tokens.tolist()
    reported = decode(several.labels[several.labels >= 0])
    assert reported == "b<|im_end|>\nd<|im_end|>\n", (
        "what the user asks in a completion is no answer of the assistant's"
    )
    assert 256 not in one.tokens


@pytest.mark.parametrize(
    ("prompt", "completion", "what"),
    [
        ("a", None, "'completion' holds nothing instead of text"),
        (3, "b", "'prompt' holds a value of type int instead of text"),
        (chat("a"), "b", "'completion' holds a value of type str instead of a list"),
        ("a", chat("a"), "'prompt' holds a value of type str instead of a list"),
        ([], chat("a"), "'prompt' holds no message"),
        (chat("a"), [], "'completion' holds no message"),
        (chat("a", "b"), chat("c", "d")[1:], "last message of 'prompt' is the assistant's"),
        ("a", "\ud800", "not Unicode"),
    ],
)
def test_values_that_are_no_prompt_and_completion_are_told_apart(directory, prompt, completion, what):
    for tokenizer in ("bytes", str(directory)):
        encoder = chat_encoder(directory, CHATML.plain, record="prompt_completion", tokenizer=tokenizer)
        with pytest.raises(RecordProblem, match=what):
            encoder.encode((prompt, completion))


TOOL = {"role": "tool", "content": "5 degrees", "tool_call_id": "abcdefghi", "name": "weather"}


@pytest.mark.parametrize("tagged", [False, True])
@settings(deadline=None)
@given(data=st.data())
def test_a_conversation_cut_anywhere_has_the_labels_of_the_whole_one(directory, tagged, data):
    turn = st.lists(texts.map(lambda text: f"x{text}y"), min_size=2, max_size=3)
    messages = []
    for question, answer, *second in data.draw(st.lists(turn, min_size=1, max_size=3)):
        messages += chat(question, answer) + ([TOOL, chat("", second[0])[1]] if second else [])
    cut = data.draw(st.integers(1, len(messages) - 1))
    template = CHATML.tagged if tagged else CHATML.plain
    of_messages = chat_encoder(directory, template, tokenizer=str(directory))
    whole, before = of_messages.encode((messages,)), of_messages.encode((messages[:cut],))
    encoder = chat_encoder(directory, template, record="prompt_completion", tokenizer=str(directory))
    document = encoder.encode((messages[:cut], messages[cut:]))
    assert document.tokens.tolist() == whole.tokens.tolist()
    start = int(np.count_nonzero(before.labels >= 0))
    labelled = np.flatnonzero(whole.labels >= 0)
    expected = np.full_like(whole.labels, -100)
    expected[labelled[start:]] = whole.labels[labelled[start:]]
    assert document.labels.tolist() == expected.tolist()
    assert "degrees" not in FileTokenizer(directory).decode(document.labels[document.labels >= 0])


def test_strings_need_no_template_and_messages_say_that_there_is_none(encoder):
    with pytest.raises(RecordProblem, match=r"no chat template.*data\.chat_template"):
        encoder.encode((chat("a"), chat("a", "b")[1:]))
