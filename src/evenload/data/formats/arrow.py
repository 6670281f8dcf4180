"""Arrow IPC: one record per row; the file format and the stream format, as `datasets` caches and Feather files are.

An offset is a record batch and a row in it. A file has an index of its batches, so a part is a share of them, and
none before it is touched. A stream has none: its batches are passed from the beginning, bodies untouched, and one
belongs to the part in whose range of bytes it begins. Local files are mapped into memory, and only the wanted columns
are loaded. Buffers are checked before they are used, so damaged offsets cannot lead outside them.

Price: some 10 µs per batch of a stream before the place where reading begins, decompressed where it is compressed; a
remote file is one part. One batch in memory where it is compressed or remote, its pages otherwise.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from evenload.data.formats.arrow_values import arrow_records, batch_rows, check_schema, check_values, is_nested
from evenload.data.formats.columns import Column
from evenload.data.formats.record import FILE_END, FileFacts, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile, is_storage_failure, unreadable

_FILE_MAGIC, _FEATHER_1_MAGIC = b"ARROW1", b"FEA1"
_DAMAGE = (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError)
_ROW_BITS = 40
# Mapped pages count as memory of the process until they are given back; arrays on them stay valid.
_RELEASE_BYTES = 1 << 23


@dataclass(frozen=True)
class ArrowReader(RecordReader):
    """Reader of format "arrow"."""

    columns: tuple[Column, ...]

    def can_share(self, file: SourceFile) -> bool:
        return file.is_local

    def look(self, file: SourceFile) -> FileFacts:
        names: tuple[str, ...] = ()
        with _open_source(file) as (source, _):
            try:
                names = tuple(_open_reader(source).schema.names)
                if not file.is_local:  # whose bodies would be read
                    return FileFacts(names)
                batches = _Batches(source, _open_reader(source, [0]))
                return FileFacts(names, sum(len(batch) for _, batch in batches.of_part(FilePart(), 0)))
            except _DAMAGE:
                return FileFacts(names)  # its reader reports the damage

    def origin(self, file: SourceFile, offset: int) -> str:
        """File and 1-based row. Reads the file up to there."""
        number, row = offset >> _ROW_BITS, offset & ((1 << _ROW_BITS) - 1)
        try:
            with _open_source(file) as (source, _):
                for at, batch in _Batches(source, _open_reader(source, [0])).of_part(FilePart(), 0):
                    if at == number:
                        break
                    row += len(batch)
        except _DAMAGE:
            return f"{file.name}:batch {number + 1}, row {row + 1}"
        return f"{file.name}:row {row + 1}"

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        at, used_bytes = offset or 0, 0
        with _open_source(file) as (source, mapped):
            batches: _Batches | None = None
            try:
                schema = _open_reader(source).schema
                fields = [schema.get_field_index(each.name) for each in check_schema(schema, self.columns, file.name)]
                batches = _Batches(source, _open_reader(source, fields))
                for number, batch in batches.of_part(part, at >> _ROW_BITS):
                    at = max(at, number << _ROW_BITS)
                    for arrays in _slices(batch, at - (number << _ROW_BITS)):
                        yield from arrow_records(arrays, self.columns, at)
                        at += len(next(iter(arrays.values())))
                        used_bytes += sum(array.nbytes for array in arrays.values())
                        if mapped is not None and used_bytes > _RELEASE_BYTES:
                            mapped.madvise(mmap.MADV_DONTNEED)
                            used_bytes = 0
                    at = (number + 1) << _ROW_BITS
            except _DAMAGE as err:
                if isinstance(err, OSError) and is_storage_failure(err):
                    raise unreadable(file, err) from err
                if part.index == 0 if batches is None else batches.is_in_part:
                    damaged = f"the Arrow file is damaged from batch {1 + (at >> _ROW_BITS)} on: {err}"
                    yield Record(at, FILE_END, None, damaged)


def _slices(batch: pa.RecordBatch, first: int) -> Iterator[dict[str, pa.Array]]:
    """The columns of a batch from a row on, checked, in slices of about `BATCH_BYTES`."""
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    for array in arrays.values():
        # A slice of a nested array cannot be checked without checking all of its items. Of others the ends of
        # the offsets are enough here; unchecked, even the size of an array is read outside of its buffers.
        if is_nested(array.type):
            check_values(array)
        else:
            array.validate()
    size = batch_rows(len(batch), sum(array.nbytes for array in arrays.values()))
    for begin in range(first, len(batch), size):
        sliced = {name: array.slice(begin, size) for name, array in arrays.items()}
        for array in sliced.values():
            if not is_nested(array.type):
                check_values(array)
        yield sliced


class _Batches:
    """The record batches of an open file or stream; `is_in_part` says whether the next one belongs to the part."""

    def __init__(self, source: pa.NativeFile, reader: Any) -> None:
        self._source, self._reader = source, reader
        self.is_in_part = False

    def of_part(self, part: FilePart, first: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Number and content of the part's batches, from number `first` on."""
        if isinstance(self._reader, pa.ipc.RecordBatchFileReader):
            span = part.range_of(self._reader.num_record_batches)
            self.is_in_part = True
            for number in range(max(first, span.start), span.stop):
                yield number, self._reader.get_batch(number)
            return
        span = part.range_of(self._source.size()) if part.count > 1 else None
        number = -1
        while span is None or self._source.tell() < span.stop:
            self.is_in_part = span is None or self._source.tell() >= span.start
            try:
                batch = self._reader.read_next_batch()
            except StopIteration:
                return
            number += 1
            if self.is_in_part and number >= first:
                yield number, batch


def _open_reader(source: pa.NativeFile, fields: list[int] | None = None) -> Any:
    """pyarrow's reader of a file or a stream, from its beginning."""
    source.seek(0)
    begin = source.read(len(_FILE_MAGIC))
    source.seek(0)
    if begin.startswith(_FEATHER_1_MAGIC):
        raise pa.ArrowInvalid("it is a Feather file of version 1, which is no Arrow file; write it anew")
    options = pa.ipc.IpcReadOptions(included_fields=fields or [], use_threads=False)
    opens = pa.ipc.open_file if begin == _FILE_MAGIC else pa.ipc.open_stream
    return opens(source, options=options)


@contextmanager
def _open_source(file: SourceFile) -> Iterator[tuple[pa.NativeFile, mmap.mmap | None]]:
    """The bytes of a file for pyarrow, and the map that they are in where the file is local."""
    with file.open() as stream:
        if not file.is_local:
            yield pa.PythonFile(stream, mode="r"), None
        elif not stream.seek(0, 2):
            yield pa.BufferReader(b""), None  # which cannot be mapped
        else:
            # The map is closed by its last array.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            yield pa.BufferReader(pa.py_buffer(mapped)), mapped
