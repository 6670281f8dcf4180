"""What data sets write in several forms reaches a chat template in the one that it writes as it is meant."""

import json
import pickle

import pytest

from chat_cases import CHATML, LLAMA, MISTRAL, chat, chat_encoder
from evenload.data.chat_encoding import Chats, ChatTemplate, read_messages
from evenload.data.encoders import RecordProblem
from evenload.data.tokenize import ByteTokenizer

ARGUMENTS = {"city": "Köln", "days": [1, 2.5], "unit": None}
LOOP = "{% for m in messages %}<{{ m.role }}>{{ m.content }}BODY{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}CALL{% endfor %}"
# As published: Qwen and Llama, Hermes (the whole call), DeepSeek (joins text), GLM (walks through), one that asks.
OBJECT = {
    "qwen": "{% set f = c.function if c.function is defined else c %}{{ f.name }}({{ f.arguments | tojson }})",
    "hermes": "{{ c.function | tojson }}",
    "glm": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}",
}
TEXT = {"deepseek": "{{ c.function.name + '(' + c.function.arguments + ')' }}"}
EITHER = {
    "asks": "{% if c.function.arguments is string %}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
}


def template_of(call="", loop=LOOP):
    return ChatTemplate(loop.replace("BODY", CALLS.replace("CALL", call) if call else ""), {}, "t")


def rendered(template, messages):
    return template.render(read_messages(messages, "messages", template))


def call_of(arguments, flat=False):
    function = {"name": "weather", "arguments": arguments}
    return [{"role": "assistant", "tool_calls": [function if flat else {"type": "function", "function": function}]}]


@pytest.mark.parametrize("name", [*OBJECT, *TEXT, *EITHER])
def test_arguments_are_written_once_whichever_form_they_have(name):
    template = template_of((OBJECT | TEXT | EITHER)[name])
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    question = [{"role": "user", "content": "q"}]
    from_text = rendered(template, question + call_of(text))
    assert from_text == rendered(template, question + call_of(ARGUMENTS))
    right = question + call_of(text if name in TEXT else ARGUMENTS)
    assert from_text == template.render(right)
    assert "Köln" in from_text
    assert "\\" not in from_text
    assert "{'" not in from_text


def test_calls_without_a_function_object_are_decoded_too():
    template = template_of(OBJECT["qwen"])
    text = rendered(template, call_of(json.dumps(ARGUMENTS), flat=True))
    assert text.endswith(f"weather({json.dumps(ARGUMENTS, ensure_ascii=False)})")


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '"text"', "", None, 3])
def test_arguments_that_are_no_object_stay_as_they_are(arguments):
    template = template_of(OBJECT["qwen"])
    messages = call_of(arguments)
    assert rendered(template, messages) == template.render(messages)


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    "loop",
    [
        LOOP,
        "{% for m in messages %}{{ '<' + m.role + '>' + m['content'] }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}{% endfor %}",
    ],
    ids=["writes", "joins", "filters", "json"],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_of_text_are_joined_where_the_template_writes_text(loop, role):
    template = template_of(loop=loop)
    got = rendered(template, [{"role": role, "content": parts("a ", "b")}])
    assert got == template.render([{"role": role, "content": "a b"}])


WALKS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}"
    "{% endfor %}{% endfor %}"
)


BY_ROLE = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}|{% endfor %}"
)


@pytest.mark.parametrize(
    ("loop", "messages", "expected"),
    [
        (WALKS, [{"role": "user", "content": parts("a", "b")}], "<user>[a][b]"),
        (WALKS, chat("hello", "you"), "<user>[hello]<assistant>[you]"),
        (BY_ROLE, chat("a", "b"), "a|b|"),
        (BY_ROLE, [message | {"content": parts(message["content"])} for message in chat("a", "b")], "a|b|"),
    ],
    ids=["parts stay", "text becomes a part", "by role", "parts by role"],
)
def test_content_is_given_in_the_form_that_the_template_wants_of_its_role(loop, messages, expected):
    assert rendered(template_of(loop=loop), messages) == expected


@pytest.mark.parametrize("case", [CHATML, LLAMA, MISTRAL], ids=lambda case: case.name)
def test_published_templates_get_the_same_text_from_parts(case):
    template = ChatTemplate(case.plain, {"bos_token": case.bos, "eos_token": case.eos}, "t")
    messages = chat("a", "b", "c", "d", system="s" if case.system else None)
    as_parts = [message | {"content": parts(message["content"])} for message in messages]
    assert rendered(template, as_parts) == template.render(messages)


def test_a_part_without_text_is_a_problem_of_the_record():
    with pytest.raises(RecordProblem, match="content part of type 'text'"):
        rendered(template_of(), [{"role": "user", "content": [{"type": "text"}]}])


@pytest.mark.parametrize(
    ("role", "usual"),
    [("Assistant", "assistant"), ("USER", "user"), (" system ", "system"), ("gpt", "assistant"), ("human", "user")],
)
def test_a_role_by_another_name_is_refused_with_the_usual_one(role, usual):
    with pytest.raises(RecordProblem, match=f"message 1 of 'messages' has role '{role}', .*call it '{usual}'"):
        rendered(template_of(), [*chat("a"), {"role": role, "content": "b"}])


def test_roles_that_the_template_itself_names_are_its_own_affair():
    loop = "{% for m in messages %}{{ {'human': 'H', 'gpt': 'G'}[m.role] }}"
    loop += "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]
    assert rendered(template_of(loop=loop), messages) == "HaGb"
    without = template_of(loop=loop.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    with pytest.raises(RecordProblem, match="call it 'assistant'"):  # what it says could not be told
        rendered(without, messages)
    assert rendered(template_of(), [{"role": "ipython", "content": "b"}]) == "<ipython>b"


def test_encoders_use_the_forms_and_travel_to_workers(tmp_path):
    source = LOOP.replace("BODY", CALLS.replace("CALL", OBJECT["qwen"]))
    question, answer = {"role": "user", "content": parts("q")}, call_of('{"a": 1}')[0] | {"content": parts("see")}
    for record, values in (("messages", ([question, answer],)), ("prompt_completion", ([question], [answer]))):
        encoder = pickle.loads(pickle.dumps(chat_encoder(tmp_path, source, record=record)))
        assert ByteTokenizer().decode(encoder.encode(values).tokens) == '<user>q<assistant>seeweather({"a": 1})'
    assert Chats(("messages",), template_of(), True).render(([question],)).text == "<user>q"
