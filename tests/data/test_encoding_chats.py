import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from chat_cases import (
    CHATML,
    FORGETFUL,
    LLAMA,
    MISTRAL,
    TEMPLATES,
    chat,
    chat_encoder,
    encoder_config,
    train_chat_tokenizer,
)
from evenload.data.chat_encoding import Chats, ChatTemplate, open_encoder, read_messages
from evenload.data.encoders import RecordProblem
from evenload.data.tokenize import ByteTokenizer, FileTokenizer
from evenload.errors import ConfigError

contents = st.text(alphabet=st.sampled_from("ab, \n\t.é三😀<"), max_size=12)
plain_contents = contents.map(lambda text: "x" + text + "y")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("chats")
    train_chat_tokenizer(root)
    for case in TEMPLATES:
        (root / case.name).mkdir()
        (root / case.name / "tokenizer.json").write_bytes((root / "tokenizer.json").read_bytes())
        (root / case.name / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": case.bos, "eos_token": {"content": case.eos}, "chat_template": case.plain})
        )
        (root / f"{case.name}.jinja").write_text(case.tagged)
    return root


def our_encoder(directory, case, tagged, **settings):
    template = {"chat_template": str(directory / f"{case.name}.jinja")} if tagged else {}
    return open_encoder(encoder_config(record="messages", tokenizer=str(directory / case.name), **template, **settings))


@pytest.fixture(scope="module")
def encoders(directory):
    return {(case, tagged): our_encoder(directory, case, tagged) for case in TEMPLATES for tagged in (False, True)}


@pytest.fixture(scope="module")
def their_tokenizers(directory):
    path = str(directory / "exact.json")
    return {
        case: PreTrainedTokenizerFast(tokenizer_file=path, bos_token=case.bos, eos_token=case.eos) for case in TEMPLATES
    }


def their_encoding(tokenizer, case, messages):
    result = tokenizer.apply_chat_template(
        messages,
        chat_template=case.tagged,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **({"date_string": "26 Jul 2024"} if case is LLAMA else {}),
    )
    return result["input_ids"], result["assistant_masks"]


def labels_from_mask(ids, mask):
    labels = [token if used else -100 for token, used in zip(ids, mask, strict=True)]
    return [-100, *labels[1:]]


def conversations(texts, system=True):
    turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=4).map(lambda pairs: [t for p in pairs for t in p])
    opening = st.none() | texts if system else st.none()
    return st.builds(lambda parts, first: chat(*parts, system=first), turns, opening)


@pytest.mark.parametrize("case", TEMPLATES, ids=lambda case: case.name)
@settings(deadline=None)
@given(data=st.data())
def test_generation_blocks_give_the_tokens_and_mask_of_transformers(encoders, their_tokenizers, case, data):
    messages = data.draw(conversations(contents, case.system))
    ids, mask = their_encoding(their_tokenizers[case], case, messages)
    document = encoders[case, True].encode((messages,))
    assert document.tokens.tolist() == ids
    assert document.labels.tolist() == labels_from_mask(ids, mask)
    assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("case", TEMPLATES, ids=lambda case: case.name)
@settings(deadline=None)
@given(data=st.data())
def test_prefix_renderings_find_what_generation_blocks_mark(encoders, case, data):
    messages = data.draw(conversations(plain_contents, case.system))
    tagged = encoders[case, True].encode((messages,))
    plain = encoders[case, False].encode((messages,))
    assert plain.tokens.tolist() == tagged.tokens.tolist()
    assert plain.labels.tolist() == tagged.labels.tolist()


@pytest.mark.parametrize(
    ("answer", "file", "agree"),
    [("so 🙂", "exact.json", False), (" so", "tokenizer.json", False), (" so", "exact.json", True)],
)
def test_masks_hold_where_transformers_loses_tokens(directory, answer, file, agree):
    """A last character of several tokens, and a first space that the tokeniser cuts out of offsets."""
    source = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    messages = chat("a", answer)[1:]
    document = chat_encoder(directory, source, tokenizer=str(directory / file)).encode((messages,))
    trained = document.labels[document.labels >= 0]
    assert FileTokenizer(directory / file).decode(trained) == answer
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / file))
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    result = tokenizer.apply_chat_template(messages, chat_template=source, **options)
    assert result["input_ids"] == document.tokens.tolist()
    assert (sum(result["assistant_masks"]) == len(trained)) is agree


@pytest.mark.parametrize("key", ["thinking", "reasoning", "reasoning_content"])
def test_thoughts_reach_the_template_under_any_of_their_names(their_tokenizers, key):
    source = (
        "{% for m in messages %}{{ m.role }}({{ m.reasoning_content }}|{{ m.thinking }}){{ m.content }}{% endfor %}"
    )
    question, answer = chat("a", "b")
    messages = [question, answer | {key: "hm", "name": None}]
    expected = their_tokenizers[CHATML].apply_chat_template(messages, chat_template=source, tokenize=False)
    template = ChatTemplate(source, {}, "t")
    assert template.render(read_messages(messages, "messages", template)) == expected
    assert "(hm|hm)b" in expected


@pytest.mark.parametrize("tagged", [False, True])
def test_bytes_of_the_assistant_alone_are_labels(tmp_path, tagged):
    encoder = chat_encoder(tmp_path, CHATML.tagged if tagged else CHATML.plain)
    document = encoder.encode((chat("Grüße", "三 😀", "", "ok", system="<|im_end|>"),))
    trained = document.labels[document.labels >= 0]
    assert ByteTokenizer().decode(trained) == "三 😀<|im_end|>\nok<|im_end|>\n"
    assert document.tokens[document.labels >= 0].tolist() == trained.tolist()
    assert ByteTokenizer().decode(document.tokens).startswith("<|im_start|>system\n<|im_end|><|im_end|>\n")


def test_a_token_over_the_border_is_prompt_unless_the_template_marks_it(directory):
    """The header's last newline and the answer are one token."""
    messages = chat("Hi", "\n")
    expected = {}
    for tagged in (False, True):
        document = our_encoder(directory, CHATML, tagged).encode((messages,))
        expected[tagged] = FileTokenizer(directory / "tokenizer.json").decode(document.labels[document.labels >= 0])
    assert expected == {False: "\n", True: "\n\n\n"}


def test_loss_on_all_needs_no_spans(directory):
    encoder = chat_encoder(directory, FORGETFUL, tokenizer=str(directory / "chatml"), loss_on="all")
    thoughtful = [message | {"thinking": "hm"} for message in chat("a", "b", "c", "d")]
    document = encoder.encode((thoughtful,))
    assert document.labels is None
    assert "(hm)d" in FileTokenizer(directory / "tokenizer.json").decode(document.tokens)


def test_a_template_that_rewrites_earlier_turns_is_refused_where_it_does(directory):
    encoder = chat_encoder(directory, FORGETFUL)
    thoughts = {"reasoning_content": "hm"}
    first, answer, second, last = chat("a", "b", "c", "d")
    fine = encoder.encode(([first, answer, second, last | thoughts],))
    assert ByteTokenizer().decode(fine.labels[fine.labels >= 0]) == "b<|im_end|>\n(hm)d<|im_end|>\n"
    with pytest.raises(RecordProblem, match=r"message 1 differently.*generation.*loss_on"):
        encoder.encode(([first, answer | thoughts, second, last],))


def test_a_generation_prompt_that_the_answer_does_not_begin_with_is_refused():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = ChatTemplate(source + "{% if add_generation_prompt %}<assistant><think>{% endif %}", {}, "t")
    with pytest.raises(RecordProblem, match=r"prompt for message 1 .*data\.chat_template"):
        Chats(("messages",), template, True).render((chat("a", "b"),))


def test_conversations_without_the_assistant_or_any_message_train_nothing(directory):
    encoder = our_encoder(directory, CHATML, tagged=False)
    document, empty = encoder.encode((chat("just a question"),)), encoder.encode(([],))
    assert (document.labels == -100).all()
    assert len(document.tokens)
    assert (len(empty.tokens), len(empty.labels)) == (0, 0)


def test_columns_filled_with_null_are_not_seen_by_the_template(directory):
    """Arrow gives every message all keys; templates write None or ask `is defined`."""
    source = (
        "{% for m in messages %}{{ m.role }}{% if m.tool_calls is defined %}!{% endif %}{{ m.content }}{% endfor %}"
    )
    with_null = [message | {"tool_calls": None} for message in chat("a", "b")]
    assert ByteTokenizer().decode(chat_encoder(directory, source).encode((with_null,)).tokens) == "useraassistantb"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "nothing instead of a list"),
        ("[]", "type str instead of a list"),
        ([["user", "hi"]], "message 0 .* type list"),
        ([{"author": "human", "text": "hi"}], r"no 'role'.*'author', 'text'"),
        ([{"from": "narrator", "value": "hi"}], r"message 0 .* is from 'narrator'; known are .*gpt.*function_call"),
        ([{"from": "function_call", "value": "f(1)"}], r"message 0 .* function_call, but its value is no JSON object"),
        ([{"role": "user", "content": None}], "neither content nor tool_calls"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'; only text"),
        ([{"role": "user", "content": ["hi"]}], "type 'str'"),
        (chat("a", "b")[1:], "begins with the assistant"),
        ([{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "a"}], "not Unicode"),
    ],
)
def test_values_that_are_no_conversation_are_told_apart(directory, value, what):
    with pytest.raises(RecordProblem, match=what):
        our_encoder(directory, CHATML, tagged=False).encode((value,))


def test_what_a_template_refuses_is_a_problem_of_the_record(directory):
    encoder = our_encoder(directory, MISTRAL, tagged=True)
    with pytest.raises(RecordProblem, match="must alternate"):
        encoder.encode((chat("a", "b", system="s"),))
    with pytest.raises(RecordProblem, match="U\\+FDD0"):
        encoder.encode((chat("a", "b\ufdd0"),))
    broken = ChatTemplate("{{ messages[0].content + 1 }}", {}, "broken.jinja")
    with pytest.raises(RecordProblem, match=r"broken\.jinja.*TypeError"):
        broken.render(chat("a"))


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{% for m in messages %}\n{{ m.content }", "line 2"),
        ("{% generation %}", "line 1"),
        ("{% macro say(m) %}{% generation %}{{ m }}{% endgeneration %}{% endmacro %}", "inside a macro"),
        ("\n{% set x %}{% generation %}a{% endgeneration %}{% endset %}", "line 2: .*inside a set"),
    ],
)
def test_templates_that_cannot_work_are_refused_at_the_start(source, what):
    with pytest.raises(ConfigError, match=what):
        ChatTemplate(source, {}, "t")


def test_templates_have_what_published_ones_use():
    source = (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}"
        "{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}"
        "{%- set ns.n = ns.n + 1 -%}{{ {'é': '<b>'} | tojson }}{{ m | tojson(indent=1, sort_keys=true) }}"
        "{%- if ns.n == 2 -%}{%- break -%}{%- endif -%}{%- endfor -%}{{ strftime_now('%Y-%m-%d') }}{{ tools is none }}"
    )
    text = ChatTemplate(source, {}, "t").render(chat("a", "b", "c", system="s"))
    one = '{\n "content": "a",\n "role": "user"\n}'
    two = '{\n "content": "b",\n "role": "assistant"\n}'
    assert text == f'{{"é": "<b>"}}{one}{{"é": "<b>"}}{two}2024-07-26True'


def test_templates_cannot_reach_python():
    for source in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(RecordProblem):
            ChatTemplate(source, {}, "t").render(chat("a"))


def test_encoders_name_all_that_decides_their_tokens(directory):
    cases = [(case, tagged, loss) for case in TEMPLATES for tagged in (False, True) for loss in ("completion", "all")]
    names = {our_encoder(directory, case, tagged, loss_on=loss).name for case, tagged, loss in cases}
    assert len(names) == len(cases)
    assert our_encoder(directory, LLAMA, tagged=True).columns == ("messages", "tools", "chat_template_kwargs")
