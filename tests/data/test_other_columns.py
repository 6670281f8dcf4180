"""Columns beside the wanted ones: used, checked to change nothing, or refused until a setting says "ignore"."""

import json

import numpy as np
import pytest
from datasets import Dataset

from chat_cases import CHATML, chat, chat_encoder
from corpus_files import data_config
from evenload.data.chat_encoding import open_encoder
from evenload.data.config import DataConfig
from evenload.data.encoders import RecordProblem
from evenload.data.loader import GlobalBatchLoader
from evenload.data.part_files import open_part
from evenload.data.records import OtherColumnError, record_columns
from evenload.data.tokenize import ByteTokenizer
from evenload.errors import DataError
from format_files import write_rows

IDS = [5, 6, 7, 8]
WAYS = ("jsonl", "jsonl.gz", "parquet", "file.arrow", "dataset", "stream", "transform")
CHANGES_NOTHING = {
    "attention_mask": [1, 1, 1, 1],
    "position_ids": [0, 1, 2, 3],
    "seq_lengths": [4],
    "seq_idx": [3, 3, 3, 3],
    "weight": 1.0,
    "loss_weights": [1.0, 1, 1, 1],
    "images": [],
    "cu_seqlens": [],
}
CHANGES_SOMETHING = {
    "attention_mask ": [1, 1],
    "attention_mask  ": [[1, 1, 1, 1]],
    "position_ids ": [0, 1],
    "seq_lengths ": [2],
    "attention_mask": [0, 0, 1, 1],
    "position_ids": [0, 1, 0, 1],
    "seq_lengths": [2, 2],
    "segment_ids": [0, 0, 1, 1],
    "weight": 0.5,
    "loss_weights": [1.0, 0.5, 1.0, 1.0],
    "images": ["a.png"],
    "cu_seqlens": [0, 2, 4],
}


def documents_of(tmp_path, way, rows, **settings):
    datasets = {}
    if way in ("dataset", "stream", "transform"):
        dataset = Dataset.from_list(rows)
        if way == "transform":
            dataset = dataset.with_transform(lambda batch: batch)
        datasets = {"rows": dataset.to_iterable_dataset() if way == "stream" else dataset}
        source = "rows"
    else:
        source = write_rows(tmp_path, way, rows)
    settings = {"record": "tokens", "shuffle_window": 1, "batch_documents": len(rows)} | settings
    batch = GlobalBatchLoader(data_config(source, **settings), datasets=datasets).next_batch()
    table = batch.tokens
    return [(table[each.doc_id].tolist(), table.labels_of(each.doc_id).tolist()) for each in batch.documents]


@pytest.mark.parametrize("way", WAYS)
def test_labels_and_masks_are_used_where_records_have_them(tmp_path, way):
    labels, mask = [-100, -100, 7, 8], [0, 1, 1, 0]
    rows = [
        {"input_ids": IDS, "labels": labels, "completion_mask": mask, "assistant_masks": [True, True, True, True]},
        {"input_ids": IDS, "labels": None, "completion_mask": None, "assistant_masks": None},
    ]
    assert documents_of(tmp_path, way, rows) == [(IDS, [-100, -100, 7, -100]), (IDS, [-100, 6, 7, 8])]
    ignored = documents_of(tmp_path, way, rows, ignore_columns=("labels", "assistant_masks"))
    assert ignored[0] == (IDS, [-100, 6, 7, -100])


@pytest.mark.parametrize("name", CHANGES_NOTHING)
@pytest.mark.parametrize("way", ["jsonl", "parquet", "dataset", "stream"])
def test_a_neighbour_that_changes_nothing_is_harmless(tmp_path, way, name):
    rows = [{"input_ids": IDS, name: CHANGES_NOTHING[name]}, {"input_ids": IDS, name: CHANGES_NOTHING[name]}]
    assert documents_of(tmp_path, way, rows) == [(IDS, [-100, 6, 7, 8])] * 2


@pytest.mark.parametrize("name", CHANGES_SOMETHING)
@pytest.mark.parametrize("way", ["jsonl", "parquet", "dataset", "stream"])
def test_a_neighbour_that_would_change_what_is_trained_stops_the_run_until_it_is_ignored(tmp_path, way, name):
    name, value = name.strip(), CHANGES_SOMETHING[name]
    harmless = CHANGES_NOTHING.get(name, [0, 0, 0, 0])
    rows = [{"input_ids": IDS, name: [harmless] if np.ndim(value) > 1 else harmless}, {"input_ids": IDS, name: value}]
    for on_corrupt in ("error", "skip"):
        why = rf"(rows\.|dataset).*: '{name}' .*set data.ignore_columns = \[\"{name}\"\]"
        with pytest.raises(DataError, match=why):
            documents_of(tmp_path, way, rows, on_corrupt=on_corrupt)
    ignored = documents_of(tmp_path, way, rows, ignore_columns=(name,))
    assert ignored == [(IDS, [-100, 6, 7, 8])] * 2


@pytest.mark.parametrize("record", ["messages", "prompt_completion"])
@pytest.mark.parametrize("name", ["system", "weight", "images"])
def test_neighbours_of_chats_are_refused_until_ignored(tmp_path, record, name):
    row = {"messages": [{"role": "user", "content": "q"}], "prompt": "p", "completion": "c"}
    source = write_rows(tmp_path, "jsonl", [row | {name: {"weight": 0}.get(name, "text")}])
    settings = {"record": record, "sources": (source,), "batch_documents": 1, "max_document_tokens": 9}
    part = open_part(DataConfig(**settings))
    with pytest.raises(DataError, match=f"'{name}' .*ignore_columns"):
        list(part.readers[0].records(part.segments[0].part))
    part = open_part(DataConfig(**settings, ignore_columns=(name,)))
    (result,) = part.readers[0].records(part.segments[0].part)
    assert len(result.values) == (1 if record == "messages" else 2)


def test_other_columns_that_say_where_the_loss_is_are_refused_beside_a_named_one(tmp_path):
    own = {"targets": [-100, 6, -100, -100], "mine": [0, 1, 1, 1]}
    rows = [{"input_ids": IDS, "labels": IDS, "loss_mask": [1, 1, 0, 1]} | own]
    with pytest.raises(DataError, match=r"'labels' says where the loss is, and \"targets\" was named instead"):
        documents_of(tmp_path, "jsonl", rows, labels_column="targets")
    with pytest.raises(DataError, match=r"'loss_mask' says where the loss is, and \"mine\" was named instead"):
        documents_of(tmp_path, "jsonl", rows, mask_column="mine")
    with pytest.raises(DataError, match=r"'labels' says where the loss is, and data.loss_on is \"all\""):
        documents_of(tmp_path, "jsonl", rows, loss_on="all")
    named = {"labels_column": "targets", "mask_column": "mine", "ignore_columns": ("labels", "loss_mask")}
    assert documents_of(tmp_path, "parquet", rows, **named) == [(IDS, [-100, 6, -100, -100])]


def test_masks_and_shifted_ids_are_no_labels():
    config = data_config("x", record="tokens", labels_column="labels")
    encoder, ids = open_encoder(config), np.array(IDS, np.int32)
    with pytest.raises(OtherColumnError, match=r"nothing but 0 and 1, as a mask does.*set data.mask_column"):
        encoder.encode((ids, np.array([0, 0, 1, 1], np.int32)))
    for shifted in ([6, 7, 8, -100], [-100, 7, 8, 9]):
        with pytest.raises(OtherColumnError, match="holds the next token at every place"):
            encoder.encode((ids, np.array(shifted, np.int32)))
    assert encoder.encode((ids, np.array([-100, 9, 7, 8], np.int32))).labels.tolist() == [-100, 9, 7, 8]


@pytest.mark.parametrize("mask", [[1, 1, 2, 1], [[1], [1]], [0.5, 1, 1, 1], "1111", [1, None, 1, 1], "missing"])
def test_a_mask_that_is_none_or_missing_is_a_problem(tmp_path, mask):
    row = {"input_ids": IDS} | ({} if mask == "missing" else {"mine": mask})
    with pytest.raises(DataError, match="'mine'" if mask == "missing" else r"'mine'|list of 0 and 1"):
        documents_of(tmp_path, "jsonl", [row], mask_column="mine")


def test_no_neighbour_has_the_name_of_a_wanted_column():
    columns = record_columns(data_config("x", record="tokens", tokens_column="attention_mask"))
    assert [column.name for column in columns].count("attention_mask") == 1
    assert len({column.name for column in columns}) == len(columns)


@pytest.mark.parametrize("way", ["jsonl", "parquet", "file.arrow"])
def test_the_start_says_what_is_used_and_what_is_not(tmp_path, way):
    rows = [{"input_ids": IDS, "attention_mask": [1] * 4, "id": 3, "url": "u"} for _ in range(7)]
    write_rows(tmp_path, way, rows)
    (tmp_path / "README.md").write_text("a card")
    (line,) = GlobalBatchLoader(data_config(str(tmp_path), record="tokens")).source_lines()
    kind = {"file.arrow": "arrow"}.get(way, way)
    assert line == (
        f"{tmp_path}: 1 {kind} file, 7 records | used as tokens: input_ids | checked to change nothing: "
        "attention_mask | not used: id, url | files left out: README.md"
    )


def test_labels_that_are_other_ids_are_told_at_the_start(tmp_path):
    labels = {"labels": [-100, 6, 9, 8]}, {"labels": [-100, 6, -100, 8]}, {}
    rows = [{"input_ids": IDS} | one for one in labels]
    for name, content in (("a", rows), ("b", rows[1:])):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name, "jsonl", content)
    sources = (str(tmp_path / "a"), str(tmp_path / "b"))
    (line,) = GlobalBatchLoader(data_config("", sources=sources, record="tokens")).label_warnings()
    assert line.startswith(f"{sources[0]}: in 1 of its first 3 records some labels are neither -100 nor the token")
    texts = write_rows(tmp_path, "jsonl", [{"text": "a"}])
    assert not GlobalBatchLoader(data_config(texts)).label_warnings()


def test_records_of_many_files_are_estimated(tmp_path):
    for index in range(40):
        (tmp_path / f"{index:02}.jsonl").write_text('{"text": "a"}\n' * (2 + index % 4))
    (line,) = GlobalBatchLoader(data_config(str(tmp_path))).source_lines()
    assert line.startswith(f"{tmp_path}: 40 jsonl files, about ")
    assert abs(int(line.split("about ")[1].split(" ")[0]) - 140) <= 12


TALK = chat("one", "two", "three", "four")
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% if mood %}<{{ mood }}>{% endif %}" + CHATML.plain


def trained_text(document):
    labels = document.tokens if document.labels is None else document.labels
    return ByteTokenizer().decode(labels[labels >= 0])


@pytest.mark.parametrize("template", [CHATML.plain, CHATML.tagged], ids=["prefixes", "blocks"])
@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
@pytest.mark.parametrize("split", [None, 1, 2, 3])
def test_messages_with_weight_0_have_no_loss(tmp_path, template, key, split):
    talk = [message | ({key: index == 3} if index % 2 else {}) for index, message in enumerate(TALK)]
    record = "messages" if split is None else "prompt_completion"
    values = (talk,) if split is None else (talk[:split], talk[split:])
    encoder = chat_encoder(tmp_path, template, record=record)
    assert trained_text(encoder.encode(values)) == "four<|im_end|>\n"
    ignoring = chat_encoder(tmp_path, template, record=record, ignore_columns=(key,))
    both = "two<|im_end|>\nfour<|im_end|>\n"
    assert trained_text(ignoring.encode(values)) == (both if split in (None, 1) else "four<|im_end|>\n")
    assert encoder.name != ignoring.name


@pytest.mark.parametrize(
    ("message", "settings", "why"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [{"a": 1}]}, {}, "has tool_calls, which chat template"),
        ({"role": "assistant", "content": "a", "train_detail": [1]}, {}, "has train_detail, which is not read"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, {}, r"message 1 has weight 0\.5, must be 0 or 1"),
        (
            {"role": "user", "content": "a", "train": True},
            {},
            "role 'user' has train True, and only what the assistant",
        ),
        ({"role": "assistant", "content": "a", "weight": 0}, {"loss_on": "all"}, "has no loss by its weight"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(tmp_path, message, settings, why):
    encoder = chat_encoder(tmp_path, CHATML.plain, **settings)
    with pytest.raises(OtherColumnError, match=why):
        encoder.encode(([TALK[0], message],))
    keys = ("weight", "train", "tool_calls", "train_detail")
    ignoring = chat_encoder(tmp_path, CHATML.plain, ignore_columns=keys, **settings)
    assert len(ignoring.encode(([TALK[0], message],)).tokens)


@pytest.mark.parametrize("way", ["jsonl", "parquet", "dataset", "stream"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_variables_of_a_record_reach_its_template(tmp_path, way, as_text):
    tools = json.dumps(TOOLS) if as_text else TOOLS
    rows = [{"messages": TALK, "tools": tools, "chat_template_kwargs": {"mood": "sunny"}}, {"messages": TALK}]
    rows[1] |= {"tools": None, "chat_template_kwargs": None}
    (tmp_path / "template.jinja").write_text(WITH_TOOLS)
    settings = {"record": "messages", "chat_template": str(tmp_path / "template.jinja"), "max_document_tokens": 999}
    first, second = documents_of(tmp_path, way, rows, **settings)
    begin = ByteTokenizer().decode(np.array(first[0])).partition("<sunny><|im_start|>user\none")
    assert json.loads(begin[0]) == TOOLS
    assert begin[1]
    assert ByteTokenizer().decode(np.array(second[0])).startswith("<|im_start|>user\none")
    assert [label for label in first[1] if label != -100] == [label for label in second[1] if label != -100]
    ignored = documents_of(tmp_path, way, rows, ignore_columns=("tools", "chat_template_kwargs"), **settings)
    assert ignored[0] == ignored[1] == second


def test_tools_that_no_template_writes_are_refused(tmp_path):
    encoder = chat_encoder(tmp_path, CHATML.plain)
    with pytest.raises(OtherColumnError, match=r"has tools, which chat template .* does not write; .*ignore_columns"):
        encoder.encode((TALK, TOOLS))
    assert len(encoder.encode((TALK, [])).tokens)
    texts = chat_encoder(tmp_path, CHATML.plain, record="prompt_completion")
    with pytest.raises(RecordProblem, match="has tools, and its prompt is a text"):
        texts.encode(("a", "b", TOOLS))
    knows = chat_encoder(tmp_path, WITH_TOOLS)
    as_text, as_objects = (knows.encode((TALK, tools)).tokens.tolist() for tools in ([json.dumps(TOOLS[0])], TOOLS))
    assert as_text == as_objects
    for tools in (["search"], [None], [TOOLS]):
        with pytest.raises(RecordProblem, match=r"must be a list of objects|not JSON"):
            knows.encode((TALK, tools))
    with pytest.raises(RecordProblem, match="'tools' holds text that is not JSON"):
        knows.encode((TALK, "{broken"))
    with pytest.raises(RecordProblem, match="'chat_template_kwargs' sets messages"):
        knows.encode((TALK, None, {"messages": []}))


def test_problems_of_chats_that_are_no_damage_stop_the_run_whatever_on_corrupt_is(tmp_path):
    rows = [{"messages": TALK}, {"messages": [TALK[0], TALK[1] | {"weight": 0.5}]}]
    (tmp_path / "template.jinja").write_text(CHATML.plain)
    settings = {"record": "messages", "chat_template": str(tmp_path / "template.jinja"), "max_document_tokens": 999}
    with pytest.raises(DataError, match=r"rows\.jsonl: message 1 has weight 0\.5"):
        documents_of(tmp_path, "jsonl", rows, on_corrupt="skip", **settings)
