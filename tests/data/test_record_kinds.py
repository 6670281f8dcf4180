"""Records of every usual form are read without a setting, from every kind of file; what cannot be told is an error."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import refused, run
from corpus_files import EOS
from evenload import PackedLoader
from evenload.data.config import DataConfig, MixturePart
from evenload.errors import ConfigError, DataError
from hf_tokenizer import some_tokenizer

PAIRS = [(f"question {i}", f"answer {i * i}") for i in range(5)]
USUAL = {"human": "user", "gpt": "assistant"}


def usual(messages):
    return [{"role": USUAL.get(one["from"], one["from"]), "content": one["value"]} for one in messages]


def shared(question, answer):
    return [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": question},
        {"from": "gpt", "value": answer},
    ]


FORMS = {
    "messages": [{"messages": usual(shared(*pair)), "prompt": pair[0], "completion": "ignored"} for pair in PAIRS],
    "conversations": [{"id": str(i), "conversations": shared(*pair)} for i, pair in enumerate(PAIRS)],
    "conversations of roles": [{"conversations": usual(shared(*pair))} for pair in PAIRS],
    "instruction": [{"instruction": q, "input": "" if i else "more", "output": a} for i, (q, a) in enumerate(PAIRS)],
    "instruction without input": [{"instruction": question, "output": answer} for question, answer in PAIRS],
    "prompt_completion": [{"prompt": question, "completion": answer} for question, answer in PAIRS],
    "prompt_completion of messages": [
        {"prompt": usual(shared(*pair))[:2], "completion": usual(shared(*pair))[2:]} for pair in PAIRS
    ],
    "text": [{"url": "a", "text": question} for question, _ in PAIRS],
    "tokens": [{"input_ids": list(question.encode())} for question, _ in PAIRS],
}  # fmt: skip


def written(directory, name, rows, file_format):
    """The rows as a file, or as a data set object."""
    path = directory / f"{name}.{file_format}"
    if file_format == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif file_format == "json":
        path.write_text(json.dumps(rows))
    elif file_format == "dataset":
        return datasets.Dataset.from_list(rows)
    elif file_format == "iterable":
        return datasets.IterableDataset.from_generator(lambda: iter(rows))
    elif file_format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
    return path


def loader_of(data, **settings):
    own = {
        "max_tokens": 256,
        "batch_documents": 3,
        "shuffle_window": 1,
        "epochs": 1,
        "workers": 0,
        "tokenizer": some_tokenizer(),
    }
    return PackedLoader(data, **(own | settings))


def packs_of(data, **settings):
    """Ids and labels of every micro-batch, and what was said at the start."""
    with loader_of(data, **settings) as loader:
        packs = [(batch["input_ids"].tolist(), batch["labels"].tolist()) for batch in loader]
    return packs, "\n".join(loader.start_messages)


def as_messages(row):
    """The same conversation as messages."""
    if "instruction" in row:
        asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    if "prompt" in row and "messages" not in row:
        return [*row["prompt"], *row["completion"]]
    messages = row.get("messages") or row["conversations"]
    return usual(messages) if "from" in messages[0] else messages


@pytest.mark.parametrize("file_format", ["jsonl", "json", "parquet", "arrow", "dataset", "iterable"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_without_a_setting(tmp_path, form, file_format):
    rows, kind = FORMS[form], form.partition(" ")[0]
    packs, start = packs_of(written(tmp_path, "data", rows, file_format))
    assert f"used as {kind}: " in start or (file_format == "iterable" and f"read as {kind}" in start)
    is_chat = kind in ("messages", "conversations", "instruction") or form.endswith("of messages")
    same = [{"messages": as_messages(row)} for row in rows] if is_chat else rows
    explicit, _ = packs_of(written(tmp_path, "same", same, "jsonl"), record="messages" if is_chat else kind)
    assert packs == explicit
    masked = sum(label == -100 for _, labels in packs for label in np.ravel(labels))
    assert (masked > len(PAIRS)) == (is_chat or kind == "prompt_completion"), "loss on answers alone"


def test_a_named_column_says_what_a_record_is_and_a_setting_wins(tmp_path):
    rows = [{"body": question, "text": answer, "ids": [1, 2]} for question, answer in PAIRS]
    path = written(tmp_path, "data", rows, "jsonl")
    bodies, start = packs_of(path, text_column="body")
    assert bodies == packs_of(written(tmp_path, "bodies", [{"text": row["body"]} for row in rows], "jsonl"))[0]
    assert "used as text: body" in start
    assert "used as tokens: ids" in packs_of(path, tokens_column="ids")[1]
    assert "used as text: text" in packs_of(path)[1]
    with pytest.raises(
        ConfigError, match=r'data\.text_column and data\.tokens_column name columns of different kinds.*= "'
    ):
        loader_of(path, text_column="body", tokens_column="ids")
    both = written(tmp_path, "both", [{"text": "a", "conversations": shared("q", "a")}], "jsonl")
    assert "used as text: text" in packs_of(both, record="text")[1]
    assert "used as conversations: conversations" in packs_of(both, record="conversations")[1]


@pytest.mark.parametrize("file_format", ["jsonl", "json", "parquet", "dataset"])
def test_records_of_two_kinds_ask_for_a_choice(tmp_path, file_format):
    data = written(tmp_path, "data", [{"text": "a", "input_ids": [1]}] * 2, file_format)
    with pytest.raises(ConfigError, match=r'has the keys text, input_ids; set data\.record = "text" or "tokens"'):
        loader_of(data)
    assert "used as tokens" in packs_of(data, record="tokens")[1]


def test_mixed_kinds_in_a_file_name_the_lines(tmp_path):
    rows = [{"text": "a"}] * 3 + [{"messages": usual(shared("q", "a")), "text": None}]
    with pytest.raises(DataError, match=r"data\.jsonl:1 of kind text, .*data\.jsonl:4 of kind messages; .*mixture"):
        loader_of(written(tmp_path, "data", rows, "jsonl"))
    with pytest.raises(DataError, match=r"data\.json:item 1 of kind text, .*data\.json:item 4 of kind messages"):
        loader_of(written(tmp_path, "data", rows, "json"))
    late = [{"text": "a"}] * 100 + rows
    with pytest.raises(DataError, match=r"late\.jsonl:104: no text under key 'text' .*messages"):
        packs_of(written(tmp_path, "late", late, "jsonl"))


def test_files_of_different_kinds_are_parts_of_a_mixture(tmp_path):
    written(tmp_path, "a", FORMS["text"], "jsonl")
    written(tmp_path, "b", FORMS["conversations"], "parquet")
    with pytest.raises(
        ConfigError, match=r"a\.jsonl holds records of kind text, .*b\.parquet of kind conv.*\[\[data\.mixture"
    ):
        loader_of(tmp_path)
    mixture = [
        {"name": name, "weight": 1.0, "sources": (str(tmp_path / f"{name}.{kind}"),)}
        for name, kind in (("a", "jsonl"), ("b", "parquet"))
    ]
    config = DataConfig(
        mixture=tuple(MixturePart(**part) for part in mixture), max_document_tokens=256, batch_documents=3, epochs=1
    )
    with PackedLoader(config, max_tokens=256, tokenizer=some_tokenizer(), workers=1) as loader:
        assert sum(len(step.planned.plan.documents) for step in loader.steps()) == 10
        start = "\n".join(loader.start_messages)
    assert "used as text: text" in start
    assert "used as conversations: conversations" in start
    assert loader.config.record == "text", "as states of runs say that were made before kinds were found"


def test_records_of_no_kind_name_keys_and_kinds(tmp_path):
    with pytest.raises(
        DataError, match=r"data\.jsonl:1 has the keys body, x, which no kind .*text: text; messages: .*rename"
    ):
        loader_of(written(tmp_path, "data", [{"body": "a", "x": 1}], "jsonl"))
    with pytest.raises(DataError, match=r"data\.parquet:row 1 has the keys body, which no kind"):
        loader_of(written(tmp_path, "data", [{"body": "a"}], "parquet"))
    # Beside records of a kind they are damaged ones, as ever.
    rows = [{"text": "a"}, {"body": "b"}, {"text": "c"}]
    path = written(tmp_path, "some", rows, "jsonl")
    with pytest.raises(DataError, match=r"some\.jsonl:2: no text under key 'text'"):
        packs_of(path)
    assert len(packs_of(path, on_corrupt="skip")[0]) == 1


def test_token_files_are_ids_and_text_files_text(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([1, 2, 9, 3, 9], np.int32))
    packs, _ = packs_of(tmp_path / "ids.npy", document_end_id=9)
    assert sorted(token for ids, _ in packs for token in np.ravel(ids)) == [1, 2, 3, 9, 9]
    (tmp_path / "a.txt").write_text("plain")
    packs, _ = packs_of(tmp_path / "a.txt", tokenizer="bytes")
    assert np.ravel(packs[0][0]).tolist() == [*b"plain", EOS]


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLED = [
    {"from": "human", "value": "1 + 2?"},
    {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1, "b": 2}})},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "3."},
]
WITH_TOOLS = (
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}{% for message in messages %}"
    "<{{ message.role }}>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("file_format", ["jsonl", "parquet", "dataset"])
@pytest.mark.parametrize("is_text", [True, False])
def test_tools_go_into_templates_that_take_them(tmp_path, file_format, is_text):
    template = tmp_path / "template.jinja"
    template.write_text(WITH_TOOLS)
    tools = json.dumps([TOOL]) if is_text else [{"type": "function", "function": {"name": "add"}}]
    data = written(tmp_path, "data", [{"conversations": CALLED, "tools": tools}], file_format)
    packs, _ = packs_of(data, tokenizer="bytes", chat_template=str(template), loss_on="all")
    text = bytes(token for token in np.ravel(packs[0][0]).tolist() if token < 256).decode()
    assert text == '(add)<user>1 + 2?<assistant>add{"a": 1, "b": 2}<tool>3<assistant>3.'


def test_tools_that_a_template_does_not_take_are_refused(tmp_path):
    data = written(tmp_path, "data", [{"conversations": shared("q", "a"), "tools": [TOOL]}], "jsonl")
    with pytest.raises(DataError, match=r"has tools, which chat template .* does not write"):
        packs_of(data)


def test_without_a_template_instructions_are_refused_as_messages_are(tmp_path):
    for form in ("instruction", "messages", "conversations"):
        path = written(tmp_path, "data", FORMS[form], "jsonl")
        with pytest.raises(
            ConfigError, match=r'plain bytes have no chat template; set data\.chat_template to .*"chatml"'
        ):
            loader_of(path, tokenizer="bytes")
        packs, _ = packs_of(path, tokenizer="bytes", chat_template="chatml")
        ids, labels = (np.ravel(values) for values in packs[0])
        spoken = bytes(ids[labels != -100].tolist()).decode()
        assert spoken.startswith("answer 0<|im_end|>\n"), "the mask is what the assistant says"


def test_instructions_with_earlier_turns_are_refused(tmp_path):
    rows = [{"instruction": "q", "output": "a", "history": [["b", "c"]]}]
    with pytest.raises(DataError, match="'history' holds earlier turns; write the records as messages"):
        packs_of(written(tmp_path, "data", rows, "jsonl"))


@pytest.mark.parametrize("file_format", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("form", FORMS)
def test_lengths_of_every_form_are_counted_without_a_setting(tmp_path, capsys, form, file_format):
    path = written(tmp_path, "chats", FORMS[form], file_format)
    assert run("lengths", str(path)) == 0
    shown = capsys.readouterr().out
    assert "5 documents" in shown
    assert f"records are read as {form.partition(' ')[0]}" in shown


def test_lengths_take_the_kind_that_is_named(tmp_path, capsys):
    path = written(tmp_path, "data", [{"text": "abc", "conversations": shared("q", "a")}], "jsonl")
    assert 'set data.record = "text" or "conversations" (evenload plan: --record)' in refused(
        capsys, "lengths", str(path)
    )
    assert run("lengths", str(path), "--record", "text") == 0
    assert "1 document, 4 bytes" in capsys.readouterr().out
    numbers = written(tmp_path, "numbers", [{"length": 7, "text": "abc"}], "json")
    assert run("lengths", str(numbers)) == 0
    assert "1 document, 7 tokens" in capsys.readouterr().out, "a column of lengths is one, as before"
