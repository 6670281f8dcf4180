"""Token files beyond what all formats have in common."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.data import token_files
from evenload.errors import ConfigError, DataError
from format_files import (
    END_ID,
    format_config,
    list_files,
    open_source,
    read_all,
    tokens_source,
    values_of,
    write_megatron,
)

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"])
def test_megatron_files_of_every_type_are_read(tmp_path, dtype):
    source = write_megatron(tmp_path / "a", DOCUMENTS, dtype)
    assert values_of(read_all(tokens_source(source), 3)) == DOCUMENTS


def test_a_document_of_several_sequences_is_one_record(tmp_path):
    source = write_megatron(tmp_path / "a", DOCUMENTS, sentences={0: [1, 0, 2], 1: [], 3: [4, 1]})
    for count in (1, 2, 4, 9):
        assert values_of(read_all(tokens_source(source), count)) == DOCUMENTS


def test_ids_that_int32_cannot_hold_are_problems_of_their_document(tmp_path):
    source = write_megatron(tmp_path / "a", [[1], [2**40, 1], [3]], "int64")
    records = read_all(tokens_source(source))
    assert [record.values is None for record in records] == [False, True, False]
    assert str(2**40) in records[1].problem
    source = write_megatron(tmp_path / "b", [[1.0, 2.5]], "float32")
    assert "2.5" in read_all(tokens_source(source))[0].problem


def change_index(source, at, value, form="<q"):
    index = Path(source).with_suffix(".idx")
    content = bytearray(index.read_bytes())
    struct.pack_into(form, content, at, value)
    index.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (9, 2, "version 2"),
        (18, 1000, "sequences need"),
        (34 + 4 * 4 + 8, 0, "contradict"),  # the second of four places
        (34 + 4 * 12, 1, "documents hold sequences 1 to 4 of 4"),
        (34 + 4 * 12 + 4 * 8, 3, "documents hold sequences 0 to 3 of 4"),
        (34 + 4 * 12 + 2 * 8, 0, "do not follow each other"),
    ],
)
def test_an_index_that_contradicts_itself_is_a_problem(tmp_path, at, value, why):
    source = write_megatron(tmp_path / "a", DOCUMENTS)
    change_index(source, at, value)
    records = read_all(tokens_source(source))
    assert records[-1].values is None
    assert why in records[-1].problem
    assert "a.idx" in records[-1].problem


def test_a_bin_of_another_size_than_its_index_says_is_a_problem(tmp_path):
    source = write_megatron(tmp_path / "a", DOCUMENTS)
    content = Path(source).read_bytes()
    for other in (content + b"\0\0", content[:-2], b""):
        Path(source).write_bytes(other)
        (record,) = read_all(tokens_source(source), 3)
        assert "ends at byte 18, the file at" in record.problem


def test_a_bin_without_index_and_an_index_without_bin_are_named(tmp_path):
    source = write_megatron(tmp_path / "a", DOCUMENTS)
    Path(source).with_suffix(".idx").unlink()
    with pytest.raises(DataError, match=r"a\.bin has no a\.idx next to it"):
        read_all(tokens_source(source))
    write_megatron(tmp_path / "b", DOCUMENTS)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(ConfigError, match=r"names b\.idx, the index of a token file, without b\.bin"):
        list_files(format_config(str(tmp_path)))


def test_a_file_and_its_index_are_one_source_file(tmp_path):
    (tmp_path / "sub").mkdir()
    write_megatron(tmp_path / "sub" / "a", DOCUMENTS)
    np.save(tmp_path / "b.npy", np.arange(3))
    files = list_files(format_config(str(tmp_path), record="tokens"))
    assert [file.key for file in files] == ["0:b.npy", "0:sub/a.bin"]
    assert [file.format for file in files] == ["memmap", "memmap"]


@pytest.mark.parametrize("dtype", ["int32", "uint16", ">i4", "uint64", "int8"])
def test_npy_files_of_every_type_are_read(tmp_path, dtype):
    documents = [[*document, END_ID] for document in DOCUMENTS]
    np.save(tmp_path / "a.npy", np.concatenate(documents).astype(dtype))
    source = str(tmp_path / "a.npy")
    assert values_of(read_all(tokens_source(source), 2)) == documents


def test_npy_without_end_id_says_what_to_set(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    reader = open_source(str(tmp_path), record="tokens")
    with pytest.raises(DataError, match=r"nothing marks where its documents end; set data\.document_end_id"):
        read_all(reader)


@pytest.mark.parametrize(
    ("array", "why"), [(np.ones((2, 2), np.int32), r"\(2, 2\)"), (np.ones(2), "float64"), (np.array(["a"]), "<U1")]
)
def test_npy_files_that_hold_no_ids_are_refused(tmp_path, array, why):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=why):
        read_all(tokens_source(str(tmp_path / "a.npy")))


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 3), max_size=60), count=st.integers(1, 8), window=st.sampled_from([1, 3, 8]))
def test_ends_are_found_across_windows_and_parts(tmp_path_factory, ids, count, window):
    documents, document = [], []
    for token in ids:
        document.append(token)
        if token == END_ID:
            documents.append(document)
            document = []
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, np.array(ids, dtype=np.uint16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "_SCAN_TOKENS", window)
        reader = tokens_source(str(path))
        records = read_all(reader, count)
        assert values_of(records) == [*documents, *([document] if document else [])]
        begins = np.cumsum([0, *(len(record.values[0]) for record in records)])
        for begin, record in zip(begins[:-1], records, strict=True):
            assert reader.origin(record.offset) == f"{path}, token {begin}"


def test_a_document_that_never_ends_is_a_problem_and_not_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_SCAN_TOKENS", 4)
    monkeypatch.setattr(token_files, "MAX_DOCUMENT_TOKENS", 8)
    np.save(tmp_path / "a.npy", np.array([1, 0] + [1] * 50 + [0, 2, 0]))
    for count in (1, 2, 5):
        records = read_all(tokens_source(str(tmp_path / "a.npy")), count)
        assert [record.values and record.values[0].tolist() for record in records] == [[1, 0], None, [2, 0]]
    assert "no id 0 ends a document within 8 tokens" in records[1].problem


def test_runs_of_documents_do_not_show(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "CHUNK_BYTES", 6)
    source = write_megatron(tmp_path / "a", DOCUMENTS)
    assert values_of(read_all(tokens_source(source), 2)) == DOCUMENTS


def test_what_token_files_cannot_hold_is_refused(tmp_path):
    source = write_megatron(tmp_path / "a", DOCUMENTS)
    with pytest.raises(ConfigError, match=r'a\.bin is read as memmap, .* data.record is "text"; set data.record'):
        open_source(source)
    for setting in ("labels_column", "mask_column"):
        with pytest.raises(ConfigError, match=rf"holds nothing but ids, and data.{setting} is 'labels'"):
            open_source(source, **{"record": "tokens", setting: "labels"})
    Path(source).rename(tmp_path / "b.bin.gz")
    with pytest.raises(ConfigError, match=r"b\.bin\.gz is a memmap file inside gzip"):
        open_source(str(tmp_path / "b.bin.gz"), record="tokens")
    (tmp_path / "c.txt").write_text("words")
    with pytest.raises(ConfigError, match=r'c\.txt is read as text, .* data.record is "messages"'):
        open_source(str(tmp_path / "c.txt"), record="messages")
