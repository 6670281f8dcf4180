"""Parquet and Arrow beyond what all formats have in common."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evenload.data import arrow_records
from evenload.data.records import FILE_END, FilePart
from evenload.errors import ConfigError, DataError
from format_files import open_source, read_all, tokens_source, values_of, write_table

TEXTS = [f"row {number}" for number in range(700)]


def test_rows_over_several_row_groups_and_batches_keep_order(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_records, "_MOST_ROWS", 64)
    pq.write_table(pa.table({"body": pa.array(TEXTS, pa.large_string())}), tmp_path / "a.parquet", row_group_size=300)
    reader = open_source(str(tmp_path), text_column="body")
    for start in (0, 1, 63, 64, 65, 299, 300, 301, 555, 699, 700, FILE_END):
        expected = TEXTS[start:] if start != FILE_END else []
        assert values_of(list(reader.records(FilePart(), start))) == expected


def test_row_groups_are_dealt_fairly(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=100)
    reader = open_source(str(tmp_path))
    sizes = [len(list(reader.records(FilePart(index, 3)))) for index in range(3)]
    assert sorted(sizes) == [200, 200, 300]
    sizes = [len(list(reader.records(FilePart(index, 20)))) for index in range(20)]
    assert sorted(sizes) == [0] * 13 + [100] * 7


@pytest.mark.parametrize("format", ["parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_texts_of_every_arrow_type_are_read(tmp_path, format, kind):
    texts = [f"text {row % 5}" for row in range(40)]
    path = tmp_path / f"rows.{format}"
    write_table(path, format, pa.table({"number": range(40), "text": pa.array(texts).cast(kind)}), 7)
    assert values_of(read_all(open_source(str(path)), 3)) == texts


@pytest.mark.parametrize("format", ["stream.arrow", "file.arrow", "feather"])
def test_dictionary_columns_beside_the_wanted_one_do_not_disturb(tmp_path, format):
    rows = 20
    names = pa.array([f"name {row % 3}" for row in range(rows)]).dictionary_encode()
    table = pa.table({"before": names, "text": [str(row) for row in range(rows)], "after": names})
    write_table(tmp_path / f"rows.{format}", format, table, 6)
    reader = open_source(str(tmp_path))
    assert values_of(read_all(reader, 3)) == [str(row) for row in range(rows)]
    reader = open_source(str(tmp_path), text_column="after")
    assert values_of(read_all(reader, 3)) == names.to_pylist()


def test_an_arrow_stream_of_before_0_15_is_read(tmp_path):
    """Its messages begin without the continuation word."""
    table = pa.table({"text": TEXTS})
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100)
    (tmp_path / "a.arrow").write_bytes(sink.getvalue())
    assert sink.getvalue()[:4] != b"\xff" * 4
    assert values_of(read_all(open_source(str(tmp_path)), 2)) == TEXTS


def test_feather_of_version_1_says_so(tmp_path):
    (tmp_path / "a.feather").write_bytes(b"FEA1" + b"\0" * 60 + b"FEA1")
    (record,) = read_all(open_source(str(tmp_path)), 3)
    assert "Feather file of version 1" in record.problem


def test_a_damaged_row_group_ends_its_part_and_spares_the_others(tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=100, compression="zstd")
    at = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(3).column(0).dictionary_page_offset
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[at : at + 200] = b"\xff" * 200
    (tmp_path / "a.parquet").write_bytes(content)
    reader = open_source(str(tmp_path))
    records = read_all(reader, 7)
    broken = [record for record in records if record.values is None]
    assert [(record.offset, record.next_offset) for record in broken] == [(300, FILE_END)]
    assert "damaged" in broken[0].problem
    assert reader.origin(300) == f"{reader.file.name}:row 301"
    assert values_of([record for record in records if record.values]) == TEXTS[:300] + TEXTS[400:]


def test_compressed_and_doubled_columns_are_refused(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.parquet\.gz is a parquet file inside gzip.*decompress"):
        open_source(str(tmp_path))
    path = tmp_path / "b.stream.arrow"
    write_table(path, "stream.arrow", pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]))
    with pytest.raises(DataError, match="several columns 'text'"):
        read_all(open_source(str(path)))


def test_fixed_size_lists_with_nulls_keep_their_rows(tmp_path):
    column = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
    write_table(tmp_path / "a.stream.arrow", "stream.arrow", pa.table({"input_ids": column}))
    records = read_all(tokens_source(str(tmp_path / "a.stream.arrow")))
    assert [record.values and record.values[0].tolist() for record in records] == [[1, 2], None, [3, 4]]
