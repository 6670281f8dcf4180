"""Files of every source format, by the plainest means, and how the tests read them."""

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from evenload.data.config import DataConfig
from evenload.data.part_files import open_reader
from evenload.data.records import FILE_END, FilePart, Record, RecordReader
from evenload.data.sources import SourceFile, list_sources

END_ID = 0
ROW_FORMATS = ("jsonl", "jsonl.gz", "parquet", "stream.arrow", "file.arrow", "feather")
TOKEN_FORMATS = (*ROW_FORMATS, "bin", "ends.npy")
ARROW_TYPES = {
    "text": pa.string(),
    "messages": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    "input_ids": pa.list_(pa.int32()),
}


def list_files(config: DataConfig) -> tuple[SourceFile, ...]:
    return tuple(file for listing in list_sources(config) for file in listing.files)


def write_rows(root: Path, format: str, rows: list[dict], rows_at_once: int = 3) -> str:
    """One file of rows with columns of one of `ARROW_TYPES` (others: as Arrow guesses); returns its path."""
    path = root / f"rows.{format}"
    if format.startswith("jsonl"):
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if format.endswith("gz") else content)
        return str(path)
    names = list(rows[0]) if rows else ["text", "input_ids"]
    table = pa.table({name: pa.array([row[name] for row in rows], ARROW_TYPES.get(name)) for name in names})
    write_table(path, format, table, rows_at_once)
    return str(path)


def write_table(path: Path, format: str, table: pa.Table, rows_at_once: int = 3) -> None:
    match format:
        case "parquet":
            pq.write_table(table, path, row_group_size=rows_at_once)
        case "stream.arrow" | "file.arrow":
            opened = pa.ipc.new_stream if format == "stream.arrow" else pa.ipc.new_file
            with pa.OSFile(str(path), "wb") as sink, opened(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=rows_at_once)
        case "feather":
            pyarrow.feather.write_feather(table, str(path), compression="lz4", chunksize=rows_at_once)
        case _:
            raise AssertionError(format)


def write_tokens(root: Path, format: str, documents: list[list[int]]) -> str:
    """One file of token documents; those of "ends.npy" have to end with `END_ID` (the last one may)."""
    if format in ROW_FORMATS:
        return write_rows(root, format, [{"text": str(ids), "input_ids": ids} for ids in documents])
    if format == "bin":
        return write_megatron(root / "tokens", documents)
    flat = np.array([token for document in documents for token in document], dtype=np.uint16)
    path = root / format
    np.save(path, flat)
    return str(path)


def write_megatron(
    prefix: Path, documents: list[list[int]], dtype: str = "uint16", sentences: dict[int, list[int]] | None = None
) -> str:
    """Write a `.bin` and its `.idx`; `sentences` are lengths of the sequences of a document, by default one."""
    lengths, edges = [], [0]
    for index, document in enumerate(documents):
        lengths += (sentences or {}).get(index, [len(document)])
        edges.append(len(lengths))
    np.array([token for document in documents for token in document], dtype=dtype).tofile(f"{prefix}.bin")
    write_megatron_index(prefix, lengths, edges, dtype)
    return f"{prefix}.bin"


def write_megatron_index(prefix: Path, lengths: list[int], edges: list[int], dtype: str) -> None:
    """An `.idx`, after the description of the format: lengths of sequences, and documents in sequences."""
    codes = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
    starts = np.cumsum([0, *lengths], dtype="<i8")[:-1] * np.dtype(dtype).itemsize
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, codes[dtype], len(lengths), len(edges))
        + np.array(lengths, "<i4").tobytes()
        + starts.tobytes()
        + np.array(edges, "<i8").tobytes()
    )


def printed_by(code: str, *arguments: str) -> str:
    """Run Python code in a process of its own, given this one's path and the arguments."""
    command = [sys.executable, "-c", code, ":".join(sys.path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def format_config(source: str, **changes: object) -> DataConfig:
    settings: dict = {"sources": (source,), "record": "text", "max_document_tokens": 8, "batch_documents": 1}
    return DataConfig(**(settings | changes))


def open_source(source: str, **changes: object) -> RecordReader:
    config = format_config(source, **changes)
    (file,) = list_files(config)
    return open_reader(file, config)


def tokens_source(source: str) -> RecordReader:
    return open_source(source, record="tokens", document_end_id=END_ID)


def read_all(reader: RecordReader, count: int = 1) -> list[Record]:
    return [record for index in range(count) for record in reader.records(FilePart(index, count))]


def plain(record: Record) -> tuple:
    """Make a record comparable."""
    values = record.values and tuple(
        ("int32", *value.tolist()) if isinstance(value, np.ndarray) and value.dtype == np.int32 else value
        for value in record.values
    )
    return (record.offset, record.next_offset, values, record.problem)


def values_of(records: list[Record]) -> list:
    """The only column of every record, token arrays as lists; no record may have a problem."""
    result = []
    for record in records:
        assert record.values is not None, record.problem
        (value,) = record.values
        if isinstance(value, np.ndarray):
            assert value.dtype == np.int32
            value = value.tolist()
        result.append(value)
    return result


def check_parts_and_offsets(reader: RecordReader, count: int, expected: list) -> None:
    """Parts are a partition of the file in order, and every offset is a place to go on."""
    whole = read_all(reader)
    assert values_of(whole) == expected
    assert [plain(record) for record in read_all(reader, count)] == [plain(record) for record in whole]
    for index in range(count):
        part = FilePart(index, count)
        records = [plain(record) for record in reader.records(part)]
        for at, record in enumerate(records):
            offset, next_offset = record[:2]
            assert next(map(plain, reader.records(part, offset))) == record
            assert [plain(left) for left in reader.records(part, next_offset)] == records[at + 1 :]
        assert list(reader.records(part, FILE_END)) == []
