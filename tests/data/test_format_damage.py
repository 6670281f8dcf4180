"""Damaged files of every format: a problem that names the place, or an error that names the file; never more."""

import contextlib
import gc
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from evenload.data.records import FILE_END, FilePart
from evenload.errors import DataError
from format_files import (
    END_ID,
    TOKEN_FORMATS,
    open_source,
    printed_by,
    read_all,
    tokens_source,
    values_of,
    write_megatron,
    write_rows,
    write_table,
    write_tokens,
)

DOCUMENTS = [[number, number + 1, 300, END_ID] for number in range(1, 30)]
WHOLE_FILE_PROBLEMS = ("parquet", "bin", "ends.npy")


def read_tolerantly(source, count=1):
    """Records and problems of a damaged file; any exception but a DataError that names it fails the test."""
    is_chat = "chats" in source
    reader = open_source(source, record="messages") if is_chat else tokens_source(source)
    try:
        records = read_all(reader, count)
    except DataError as err:
        if os.path.basename(reader.file.path) not in str(err):
            raise
        return [], [str(err)]
    good = [record for record in records if record.values is not None]
    return good, [record.problem for record in records if record.values is None]


@pytest.mark.parametrize("format", TOKEN_FORMATS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_truncated_file_is_one_problem_after_a_whole_beginning(tmp_path, format, count):
    source = write_tokens(tmp_path, format, DOCUMENTS)
    content = Path(source).read_bytes()
    for size in {0, 1, 5, 20, *range(30, len(content), max(1, len(content) // 23)), len(content) - 1}:
        Path(source).write_bytes(content[:size])
        result, problems = read_tolerantly(source, count)
        assert values_of(result) == DOCUMENTS[: len(result)], size
        # Lines may end anywhere, an empty file of them is one, and the footer of an Arrow file is not needed.
        if format != "jsonl" and (format != "jsonl.gz" or size) and len(result) < len(DOCUMENTS):
            assert len(problems) == 1, (size, problems)
        if format in WHOLE_FILE_PROBLEMS:
            assert not result


def test_a_truncated_index_is_one_problem(tmp_path):
    source = write_tokens(tmp_path, "bin", DOCUMENTS)
    index = Path(source).with_suffix(".idx")
    content = index.read_bytes()
    for size in (0, 5, 33, 60, len(content) - 1):
        index.write_bytes(content[:size])
        assert read_tolerantly(source, 2)[0] == []
        assert len(read_tolerantly(source, 2)[1]) == 1


@pytest.mark.parametrize("format", ["file.arrow", "feather"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_arrow_file_that_ends_behind_a_batch_is_truncated(tmp_path, format, count):
    """There a stream may end, but a file has a mark."""
    source = write_tokens(tmp_path, format, DOCUMENTS)
    content = Path(source).read_bytes()
    opened = pa.BufferReader(content)
    opened.seek(8)
    reader = pa.ipc.MessageReader.open_stream(opened)
    stops = []
    with contextlib.suppress(StopIteration):
        while reader.read_next_message():
            stops.append(opened.tell())
    assert len(stops) > 5
    for stop in stops[1:]:
        Path(source).write_bytes(content[:stop])
        result, problems = read_tolerantly(source, count)
        assert values_of(result) == DOCUMENTS[: len(result)]
        assert len(problems) == 1


FUZZ = """
import random, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
from test_format_damage import read_tolerantly
random.seed(3)
for source in map(Path, sys.argv[3:]):
    whole = source.read_bytes()
    for _ in range(int(sys.argv[2])):
        content = bytearray(whole)
        for _ in range(random.choice([1, 1, 4])):
            content[random.randrange(len(content))] = random.choice([0, 1, 127, 128, 255, random.randrange(256)])
        source.write_bytes(content)
        read_tolerantly(str(source), random.choice([1, 2]))
"""


def test_flipped_bytes_never_crash_the_process(tmp_path):
    """Mapped Arrow buffers with damaged offsets would be read outside the file: in a process of its own."""
    sources = []
    for format in ("stream.arrow", "file.arrow", "feather", "parquet", "jsonl.gz", "bin", "ends.npy"):
        (tmp_path / format).mkdir()
        sources.append(write_tokens(tmp_path / format, format, DOCUMENTS))
    (tmp_path / "chats").mkdir()
    rows = [{"messages": [{"role": "user", "content": "c" * row}] * (row % 3)} for row in range(30)]
    sources.append(write_rows(tmp_path / "chats", "stream.arrow", rows, 15))
    printed_by(FUZZ, "100", *sources)


def test_a_list_that_ends_far_behind_its_items_is_a_problem_and_no_crash(tmp_path):
    """pyarrow reads offsets of items even to tell the size of an array; this file once ended the process."""
    rows = [{"messages": [{"role": "user", "content": "c" * row}] * (row % 3)} for row in range(15)]
    source = write_rows(tmp_path, "stream.arrow", rows, 15)
    content = bytearray(Path(source).read_bytes())
    offsets = np.cumsum([0, *(row % 3 for row in range(15))], dtype=np.int32).tobytes()
    content[content.index(offsets) + len(offsets) - 1] = 1
    Path(source).write_bytes(content)
    read = "import sys; sys.path[:0] = sys.argv[1].split(':'); from test_format_damage import read_tolerantly; "
    (tmp_path / "chats").mkdir()
    moved = Path(source).rename(tmp_path / "chats" / "rows.stream.arrow")
    printed = printed_by(read + "print(read_tolerantly(sys.argv[2]))", str(moved))
    assert "the Arrow file is damaged from batch 1 on" in printed


@pytest.mark.parametrize("format", TOKEN_FORMATS)
def test_files_that_are_something_else_are_named(tmp_path, format):
    source = write_tokens(tmp_path, format, DOCUMENTS)
    Path(source).write_bytes(b"just some words, and not few of them, in a file of the wrong name\n" * 3)
    result, problems = read_tolerantly(source, 4)
    assert result == []
    assert problems


@pytest.mark.parametrize("format", TOKEN_FORMATS)
def test_a_file_that_is_gone_is_an_error(tmp_path, format):
    """A storage failure is no corrupt record: skipping it would lose data without a trace."""
    source = write_tokens(tmp_path, format, DOCUMENTS)
    reader = tokens_source(source)
    Path(source).unlink()
    with pytest.raises(DataError, match=os.path.basename(source)):
        list(reader.records(FilePart(0, 2)))


def test_text_that_is_not_utf8_names_byte_and_place(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"latin \xe4")
    reader = open_source(str(tmp_path))
    (record,) = reader.records(FilePart())
    assert (record.values, record.next_offset) == (None, FILE_END)
    assert "byte 0xe4 at offset 6" in record.problem
    assert reader.origin(record.offset) == reader.file.name


@pytest.mark.parametrize("format", ["parquet", "stream.arrow", "file.arrow"])
def test_one_row_that_is_not_utf8_does_not_take_its_batch_along(tmp_path, format):
    binary = pa.array([b"good", b"\xff\xfe", "äö".encode(), b"ends"], pa.binary())
    path = tmp_path / f"rows.{format}"
    write_table(path, format, pa.table({"text": binary.view(pa.string())}), 4)
    reader = open_source(str(path))
    records = read_all(reader)
    assert [record.values for record in records] == [("good",), None, ("äö",), ("ends",)]
    assert "not UTF-8" in records[1].problem
    assert reader.origin(1) == f"{path}:row 2"


@pytest.mark.parametrize("format", ["jsonl", "parquet", "stream.arrow"])
def test_values_that_are_null_or_no_ids_are_problems_of_their_row(tmp_path, format):
    wide = 2**40
    rows = [{"input_ids": ids} for ids in ([1], None, [2, None], [3, wide], [], [-(2**31)])]
    path = tmp_path / f"rows.{format}"
    if format == "jsonl":
        write_rows(tmp_path, format, rows)
    else:
        column = pa.array([row["input_ids"] for row in rows], pa.list_(pa.int64()))
        write_table(path, format, pa.table({"input_ids": column}), 6)
    reader = tokens_source(str(path))
    records = read_all(reader)
    assert [record.values is None for record in records] == [False, True, True, True, False, False]
    assert [record.values[0].tolist() for record in records if record.values] == [[1], [], [-(2**31)]]
    assert all(record.problem for record in records[1:4])
    if format != "jsonl":
        assert str(wide) in records[3].problem


@pytest.mark.parametrize("format", ["parquet", "stream.arrow", "file.arrow", "feather"])
def test_a_column_that_is_missing_or_of_another_type_names_what_there_is(tmp_path, format):
    source = write_rows(tmp_path, format, [{"body": "a", "n": 1}])
    reader = open_source(source)
    with pytest.raises(DataError, match=r"has no column 'text', only body, n; set data.text_column"):
        read_all(reader)
    reader = open_source(source, text_column="n")
    with pytest.raises(DataError, match=r"'n' is int64, not text; set data.text_column"):
        read_all(reader)
    reader = open_source(source, record="tokens", tokens_column="body")
    with pytest.raises(DataError, match=r"'body' is string, not a list of token ids; set data.tokens_column"):
        read_all(reader)


def test_wide_and_narrow_ids_of_every_arrow_type_become_int32(tmp_path):
    for kind in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()):
        for make in (pa.list_, pa.large_list, lambda inner: pa.list_(inner, 2)):
            path = tmp_path / "rows.stream.arrow"
            write_table(path, "stream.arrow", pa.table({"input_ids": pa.array([[1, 2], [3, 100]], make(kind))}))
            assert values_of(read_all(tokens_source(str(path)))) == [[1, 2], [3, 100]]


@pytest.mark.parametrize("format", ["file.arrow", "bin"])
def test_int32_ids_of_a_mapped_file_are_not_copied_and_outlive_the_reader(tmp_path, format):
    is_arrow = format == "file.arrow"
    source = (
        write_tokens(tmp_path, format, DOCUMENTS) if is_arrow else write_megatron(tmp_path / "a", DOCUMENTS, "int32")
    )
    reader = tokens_source(source)
    values = [record.values[0] for record in read_all(reader)]
    assert not any(value.flags.owndata or value.flags.writeable for value in values)
    del reader
    gc.collect()
    assert [value.tolist() for value in values] == DOCUMENTS
