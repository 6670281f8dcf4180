"""Arrow IPC: one record per row; the file format and the stream format, as `datasets` caches and Feather files are.

Offsets are rows of the file. Both formats are one row of messages (schema, dictionaries, record batches), each of
which tells its length and its rows in its head; the file format adds a magic word before them and a footer after
them, which is not needed. So heads are walked from the beginning, bodies of other batches are passed over, and a batch
belongs to the part in whose range of bytes its message begins. Local files are mapped into memory: only the pages of
wanted columns are ever read. Buffers are checked before they are used, so damaged offsets cannot lead outside them.

Price: one head (some 100 bytes) per batch before the place where reading begins; a remote file, whose heads cost a
request or reading the bodies, is one part. One batch in memory where it is compressed or remote, its pages otherwise.

Source: the Arrow columnar format, "Serialization and Interprocess Communication".
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from evenload.data.files import SourceFile
from evenload.data.formats.arrow_messages import BATCH, SCHEMA, DamagedError, Message, read_messages
from evenload.data.formats.arrow_values import arrow_records, batch_rows, check_schema, check_values, is_nested
from evenload.data.formats.columns import Column, wanted_columns
from evenload.data.formats.mapped import ByteRanges, open_ranges
from evenload.data.formats.record import FILE_END, FilePart, Record


@dataclass(frozen=True)
class ArrowReader:
    """Reader of format "arrow".

    Args:
        known: what the columns have to be, by name.
    """

    known: Mapping[str, Column]

    def num_parts(self, file: SourceFile, part_bytes: int) -> int:
        """Byte ranges of about that size; 1 of a remote file."""
        return max(1, -(-(file.size_bytes or 0) // part_bytes)) if file.is_local else 1

    def records(
        self, file: SourceFile, part: FilePart, columns: tuple[str, ...], offset: int | None = None
    ) -> Iterator[Record]:
        """The rows of the part's batches, from that row on.

        Raises:
            DataError: the file cannot be read, or lacks a column of the right type.
        """
        if offset == FILE_END:
            return
        wanted = wanted_columns(columns, self.known)
        with open_ranges(file) as ranges:
            size_bytes = ranges.size_bytes
            if size_bytes is None and part.index > 0:
                return
            start, stop = (size_bytes or 0) * part.index // part.count, None
            if size_bytes is not None and part.index + 1 < part.count:
                stop = size_bytes * (part.index + 1) // part.count
            row = offset or 0
            try:
                for first_row, arrays in _slices(ranges, start, stop, row, wanted, file.name):
                    yield from arrow_records(arrays, wanted, first_row)
                    row = first_row + len(arrays[0])
                    ranges.release(sum(array.nbytes for array in arrays))
            except DamagedError as err:
                if start <= err.position and (stop is None or err.position < stop):
                    yield Record(row, FILE_END, None, f"the Arrow file is damaged from byte {err.position} on: {err}")

    def origin(self, file: SourceFile, offset: int) -> str:
        """File and 1-based row."""
        return f"{file.name}:row {offset + 1}"


def _slices(
    ranges: ByteRanges, start: int, stop: int | None, row: int, wanted: tuple[Column, ...], name: str
) -> Iterator[tuple[int, list[pa.Array]]]:
    """First row and wanted columns of slices of the batches that begin in `[start, stop)`, from that row on."""
    for message, first_row, batch in _batches(ranges, start, stop, row, wanted, name):
        arrays = [batch.column(column.name) for column in wanted]
        size = batch_rows(len(batch), sum(array.nbytes for array in arrays))
        try:
            # A slice of a nested array cannot be checked without checking all of its items.
            for array in arrays:
                if is_nested(array.type):
                    check_values(array)
            for begin in range(max(0, row - first_row), len(batch), size):
                sliced = [array.slice(begin, size) for array in arrays]
                for array in sliced:
                    if not is_nested(array.type):
                        check_values(array)
                yield first_row + begin, sliced
        except pa.ArrowException as err:
            raise DamagedError(message.start, str(err)) from err


def _batches(
    ranges: ByteRanges, start: int, stop: int | None, row: int, wanted: tuple[Column, ...], name: str
) -> Iterator[tuple[Message, int, pa.RecordBatch]]:
    """Message, first row and wanted columns of the batches that begin in `[start, stop)` and end behind the row."""
    feed, decoder, options = _Feed(), None, None
    next_row = 0
    for message in read_messages(ranges):
        ranges.release(0)
        if stop is not None and message.start >= stop:
            return
        try:
            if message.type != BATCH:
                content = ranges.read(message.start, message.stop - message.start)
                feed.contents.append(content)
                if message.type == SCHEMA:
                    schema = pa.ipc.read_schema(pa.py_buffer(content))
                    check_schema(schema, wanted, name)
                    fields = [schema.get_field_index(column.name) for column in wanted]
                    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
                continue
            first_row, next_row = next_row, next_row + message.num_rows
            if message.start < start or next_row <= row:
                continue
            feed.contents.append(ranges.read(message.start, message.stop - message.start))
            if decoder is None:
                decoder = pa.ipc.open_stream(feed, options=options)
            batch = decoder.read_next_batch()
        except (pa.ArrowException, OSError, StopIteration, UnicodeDecodeError) as err:
            raise DamagedError(message.start, str(err)) from err
        if len(batch) != message.num_rows:
            raise DamagedError(message.start, f"a batch of {message.num_rows} rows holds {len(batch)}")
        yield message, first_row, batch


class _Feed:
    """Chosen messages as the file that Arrow's stream decoder reads; what it reads is not copied."""

    def __init__(self) -> None:
        self.contents: deque[memoryview] = deque()
        self.closed = False

    def read(self, count: int = -1) -> memoryview:
        if not self.contents:
            return memoryview(b"")
        content = self.contents[0]
        if count < 0 or count >= len(content):
            self.contents.popleft()
            return content
        self.contents[0] = content[count:]
        return content[:count]

    def close(self) -> None:
        self.closed = True
