"""Values inside values: JSON types of Arrow, keys that only other rows have, and the same records in every format."""

import json
import uuid

import pyarrow as pa
import pytest
from datasets import Dataset, Features, Json, List, Value

from evenload.data.part_files import open_part
from evenload.data.records import FilePart
from evenload.errors import DataError
from format_files import format_config, open_source, values_of, write_table

ARGUMENTS = [{"city": "Bonn"}, {"expression": "1 + 1", "steps": [{"deep": True}, {}]}]
NESTED = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": each}}]} for each in ARGUMENTS]
ROWS = [{"messages": [{"role": "user", "content": "q"}, message]} for message in NESTED]
LEFT_OUT = {"role": "user", "content": "q"}


def read_records(data, **settings):
    is_path = isinstance(data, str)
    config = format_config(data if is_path else "dataset", **{"record": "messages"} | settings)
    part = open_part(config, None if is_path else data)
    return [record for reader in part.readers for record in reader.records(FilePart())]


def all_ways(tmp_path, dataset):
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "disk")
    write_table(tmp_path / "stream.arrow", "stream.arrow", dataset.with_format("arrow")[:])
    yield from (dataset, dataset.to_iterable_dataset(), dataset.with_transform(lambda rows: rows))
    yield from (str(tmp_path / name) for name in ("a.parquet", "disk", "stream.arrow"))


def as_json(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in ("rows.jsonl", "lines.json", "list.json"):
        (tmp_path / name).write_text(json.dumps(ROWS, indent=1) if name == "list.json" else lines)
        yield str(tmp_path / name)


@pytest.mark.parametrize("stored", ["structs", "json below messages", "messages are json", "all is json"])
def test_the_same_chats_are_read_from_every_format(tmp_path, stored):
    """Arrow gives both rows both arguments, and stores what `datasets` calls Json as text."""
    messages = [row["messages"] for row in ROWS]
    match stored:
        case "structs":
            dataset = Dataset.from_list(ROWS)
        case "json below messages":
            call = {"function": {"name": Value("string"), "arguments": Json()}}
            message = {"role": Value("string"), "content": Value("string"), "tool_calls": List(call)}
            dataset = Dataset.from_dict({"messages": messages}, features=Features({"messages": List(message)}))
        case "messages are json" | "all is json":
            kind = Json() if stored == "all is json" else List(Json())
            dataset = Dataset.from_dict({"messages": messages}, features=Features({"messages": kind}))
    for data in [*all_ways(tmp_path, dataset), *as_json(tmp_path)]:
        assert [record.values for record in read_records(data)] == [(each,) for each in messages], (stored, data)


def test_json_keeps_the_nulls_that_it_spells(tmp_path):
    messages = [[{"role": "user", "content": "q", "extra": {"a": None}}]]
    dataset = Dataset.from_dict({"messages": messages}, features=Features({"messages": List(Json())}))
    for data in all_ways(tmp_path, dataset):
        if not isinstance(data, Dataset) or data.format["type"] != "custom":  # whose values may come from anywhere
            assert [record.values for record in read_records(data)] == [(each,) for each in messages]


@pytest.mark.parametrize("column", ["text", "prompt", "input_ids"])
def test_columns_of_json_hold_what_their_values_are(tmp_path, column):
    value = {"text": "a text", "prompt": [LEFT_OUT], "input_ids": [3, 4]}[column]
    row = {column: value, "completion": "c"}
    kinds = {"text": "text", "prompt": "prompt_completion", "input_ids": "tokens"}
    features = Features({column: Json(), "completion": Value("string")})
    dataset = Dataset.from_dict({key: [item] for key, item in row.items()}, features=features)
    for data in all_ways(tmp_path, dataset):
        (record,) = read_records(data, record=kinds[column])
        result = record.values[0].tolist() if column == "input_ids" else record.values[0]
        assert result == value


def test_a_json_value_of_another_kind_is_a_problem_of_its_row(tmp_path):
    values = pa.array(['"fine"', "[1]", "{broken", None, '"fine too"'], pa.json_())
    write_table(tmp_path / "a.parquet", "parquet", pa.table({"text": values}))
    result = read_records(str(tmp_path / "a.parquet"), record="text")
    assert [record.values for record in result] == [("fine",), None, None, None, ("fine too",)]
    for record, why in zip(result[1:4], ("list [1] is not text", "not JSON", "is null"), strict=True):
        assert why in record.problem


def test_plain_extension_types_are_their_values_and_others_are_refused(tmp_path):
    number = uuid.uuid4()
    ids, good = pa.array([number.bytes], pa.uuid()), pa.array([1], pa.int8()).cast(pa.bool8())
    message = pa.StructArray.from_arrays([pa.array(["user"]), ids, good], ["role", "id", "good"])
    chats = pa.ListArray.from_arrays([0, 1], message)
    write_table(tmp_path / "a.arrow", "file.arrow", pa.table({"messages": chats}))
    (record,) = read_records(str(tmp_path / "a.arrow"))
    assert record.values == ([{"role": "user", "id": number, "good": True}],)

    class Odd(pa.ExtensionType):
        def __init__(self):
            super().__init__(pa.string(), "some.odd")

        def __arrow_ext_serialize__(self):
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage, serialized):
            return cls()

    inner = pa.StructArray.from_arrays([pa.ExtensionArray.from_storage(Odd(), pa.array(["x"]))], ["odd"])
    odd = pa.ListArray.from_arrays([0, 1], inner)
    for registered in (False, True):
        write_table(tmp_path / "b.arrow", "file.arrow", pa.table({"messages": odd}))
        if registered:
            pa.register_extension_type(Odd())
        try:
            with pytest.raises(DataError, match=r"column 'messages' holds values of the extension type 'some\.odd'"):
                read_records(str(tmp_path / "b.arrow"))
        finally:
            if registered:
                pa.unregister_extension_type("some.odd")


def test_maps_are_objects_and_keys_of_other_rows_are_left_out_at_every_depth(tmp_path):
    numbers = pa.map_(pa.string(), pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    kind = pa.list_(pa.struct([("role", pa.string()), ("map", numbers)]))
    chats = pa.array([[{"role": "user", "map": [("x", {"a": 1}), ("y", {"b": 2})]}], [{"role": "user"}]], kind)
    write_table(tmp_path / "a.parquet", "parquet", pa.table({"messages": chats}))
    assert [record.values[0] for record in read_records(str(tmp_path / "a.parquet"))] == [
        [{"role": "user", "map": {"x": {"a": 1}, "y": {"b": 2}}}],
        [{"role": "user"}],
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'[{"text": "a"}, {"text"', "JSON list is damaged"),
        (
            b'{"data": [{"text": "a"}],\n "version": 1}',
            "one JSON object over several lines, with the keys 'data', 'version'",
        ),
        (b'{"text": "a"\n', "not JSON"),
        (b'["a", "b"]', "Expected `object`, got `str`"),
    ],
)
def test_json_that_holds_no_records_says_what_it_holds(tmp_path, content, why):
    (tmp_path / "a.json").write_bytes(content)
    result = read_records(str(tmp_path / "a.json"), record="text")
    assert why in result[0].problem


def test_items_of_a_json_list_are_read_from_every_offset_and_named(tmp_path):
    rows = [{"text": f"t{index}"} for index in range(5)]
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf \n" + json.dumps(rows).encode())
    reader = open_source(str(tmp_path))
    assert reader.num_parts(1) == 1
    for offset in range(6):
        assert values_of(list(reader.records(FilePart(), offset))) == [row["text"] for row in rows[offset:]]
    assert reader.origin(2) == f"{reader.file.name}:item 3"
