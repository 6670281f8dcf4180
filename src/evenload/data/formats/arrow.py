"""Arrow IPC: one record per row; the file format and the stream format, as `datasets` caches and Feather files are.

Offsets are rows of the file. Both formats are one row of messages (schema, dictionaries, record batches); the file
format adds a magic word before them and a footer after them, which is not needed. Messages are walked from the
beginning by `pyarrow.ipc`, bodies of other batches are passed over, and a batch belongs to the part in whose range of
bytes its message begins. Local files are mapped into memory: only the pages of wanted columns are ever read. Buffers
are checked before they are used, so damaged offsets cannot lead outside them.

Price: 5 µs per batch before the place where reading begins; a remote file, of which bodies are read too, is one part.
One batch in memory where it is compressed or remote, its pages otherwise.
"""

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from evenload.data.formats.arrow_values import arrow_records, batch_rows, check_schema, check_values, is_nested
from evenload.data.formats.columns import Column
from evenload.data.formats.mapped import ByteRanges, open_ranges
from evenload.data.formats.record import FILE_END, FileFacts, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile

_FILE_MAGIC, _FILE_MAGIC_BYTES = b"ARROW1", 8
_FEATHER_1_MAGIC = b"FEA1"
_DAMAGE = (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError)


class _DamagedError(Exception):
    """The file is not what the format says; `position` = the byte of the message at which that shows."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position = position


class _Message(NamedTuple):
    """A message that begins at byte `start`; of a batch its first row and number of rows, else 0."""

    start: int
    content: pa.Message
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class ArrowReader(RecordReader):
    """Reader of format "arrow"."""

    columns: tuple[Column, ...]

    def can_share(self, file: SourceFile) -> bool:
        return file.is_local

    def look(self, file: SourceFile) -> FileFacts:
        columns, num_rows = (), 0
        with open_ranges(file) as ranges:
            try:
                for message in _messages(ranges):
                    ranges.release(0)
                    if message.content.type == "schema":
                        columns = tuple(pa.ipc.read_schema(message.content).names)
                        if not file.is_local:  # whose bodies would be read
                            return FileFacts(columns)
                    num_rows += message.num_rows
            except _DamagedError:
                return FileFacts(columns)  # its reader tells the damage
        return FileFacts(columns, num_rows)

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        with open_ranges(file) as ranges:
            span = part.range_of(ranges.size_bytes or 0)
            start, stop = span.start, span.stop if part.index + 1 < part.count else None
            row = offset or 0
            try:
                for first_row, arrays in _slices(ranges, start, stop, row, self.columns, file.name):
                    yield from arrow_records(arrays, self.columns, first_row)
                    row = first_row + len(next(iter(arrays.values())))
                    ranges.release(sum(array.nbytes for array in arrays.values()))
            except _DamagedError as err:
                if start <= err.position and (stop is None or err.position < stop):
                    yield Record(row, FILE_END, None, f"the Arrow file is damaged from byte {err.position} on: {err}")


def _slices(
    ranges: ByteRanges, start: int, stop: int | None, row: int, wanted: tuple[Column, ...], name: str
) -> Iterator[tuple[int, dict[str, pa.Array]]]:
    """First row and wanted columns of slices of the batches that begin in `[start, stop)`, from that row on."""
    for message, batch in _batches(ranges, start, stop, row, wanted, name):
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        try:
            for array in arrays.values():
                # A slice of a nested array cannot be checked without checking all of its items. Of others the ends of
                # the offsets are enough here; unchecked, even the size of an array is read outside of its buffers.
                if is_nested(array.type):
                    check_values(array)
                else:
                    array.validate()
            size = batch_rows(len(batch), sum(array.nbytes for array in arrays.values()))
            for begin in range(max(0, row - message.first_row), len(batch), size):
                sliced = {name: array.slice(begin, size) for name, array in arrays.items()}
                for array in sliced.values():
                    if not is_nested(array.type):
                        check_values(array)
                yield message.first_row + begin, sliced
        except pa.ArrowException as err:
            raise _DamagedError(message.start, str(err)) from err


def _batches(
    ranges: ByteRanges, start: int, stop: int | None, row: int, wanted: tuple[Column, ...], name: str
) -> Iterator[tuple[_Message, pa.RecordBatch]]:
    """Message and wanted columns of the batches that begin in `[start, stop)` and end behind the row."""
    chosen, decoder, options = _ChosenMessages(), None, None
    for message in _messages(ranges):
        ranges.release(0)
        if stop is not None and message.start >= stop:
            return
        if message.content.type == "record batch" and (
            message.start < start or message.first_row + message.num_rows <= row
        ):
            continue
        try:
            chosen.add(message.content)
            if message.content.type == "schema":
                schema = pa.ipc.read_schema(message.content)
                fields = [schema.get_field_index(column.name) for column in check_schema(schema, wanted, name)]
                options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            if message.content.type != "record batch":
                continue
            decoder = decoder or pa.ipc.open_stream(chosen, options=options)
            batch = decoder.read_next_batch()
        except (*_DAMAGE, StopIteration) as err:
            raise _DamagedError(message.start, str(err)) from err
        if len(batch) != message.num_rows:
            raise _DamagedError(message.start, f"a batch of {message.num_rows} rows holds {len(batch)}")
        yield message, batch


def _messages(ranges: ByteRanges) -> Iterator[_Message]:
    """All messages in order, the first of them the schema."""
    begin = bytes(ranges.read(0, _FILE_MAGIC_BYTES))
    if begin.startswith(_FEATHER_1_MAGIC):
        raise _DamagedError(0, "it is a Feather file of version 1, which is no Arrow file; write it anew")
    is_file = begin.startswith(_FILE_MAGIC)
    source = ranges.arrow_file()
    source.seek(_FILE_MAGIC_BYTES if is_file else 0)
    reader = pa.ipc.MessageReader.open_stream(source)
    no_columns, next_row, seen_schema = pa.schema([]), 0, False
    while True:
        at, num_rows = source.tell(), 0
        try:
            content = reader.read_next_message()
            if content.type == "record batch":
                # Decoded without its columns, a batch says how many rows it has and touches nothing of its body.
                num_rows = pa.ipc.read_record_batch(content, no_columns).num_rows
        except StopIteration:
            break
        except _DAMAGE as err:
            raise _DamagedError(at, str(err)) from err
        if (content.type == "schema") == seen_schema:
            raise _DamagedError(at, "the schema is missing or comes twice")
        seen_schema = True
        yield _Message(at, content, next_row, num_rows)
        next_row += num_rows
    # A stream may just end; a file has a mark and a footer behind its last message.
    if not seen_schema or (is_file and source.tell() < at + 4):
        raise _DamagedError(at, "the file is empty" if not at else "the file ends too early")


class _ChosenMessages:
    """Messages as the file that Arrow's stream decoder reads; what it reads is not copied."""

    def __init__(self) -> None:
        self.closed = False
        self._contents: deque[memoryview] = deque()

    def add(self, message: pa.Message) -> None:
        prefix = struct.pack("<II", 0xFFFFFFFF, len(message.metadata))
        self._contents += [memoryview(part) for part in (prefix, message.metadata, message.body or b"") if len(part)]

    def read(self, count: int = -1) -> memoryview:
        """The next bytes, of one buffer only: the decoder asks for whole ones."""
        if not self._contents:
            return memoryview(b"")
        content = self._contents[0]
        if count < 0 or count >= len(content):
            self._contents.popleft()
            return content
        self._contents[0] = content[count:]
        return content[:count]

    def close(self) -> None:
        self.closed = True
