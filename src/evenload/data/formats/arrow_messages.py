"""The messages of an Arrow IPC file or stream, walked by their heads alone.

A message is: the continuation word (missing before Arrow 0.15), length of the head, head (a flatbuffer `Message`,
padded), body. Of the head three fields are needed: its type, the length of the body, and of a record batch the number
of rows; pyarrow offers none of them without reading the body.

Source: the Arrow columnar format, "Encapsulated message format" and "IPC File Format"; FlatBuffers binary format.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from evenload.data.formats.mapped import ByteRanges

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
_KNOWN_TYPES = (SCHEMA, DICTIONARY, BATCH)
_FILE_MAGIC, _FILE_MAGIC_BYTES = b"ARROW1", 8
_FEATHER_1_MAGIC = b"FEA1"
_CONTINUES = 0xFFFFFFFF
# Fields of the tables `Message` and `RecordBatch`, by position.
_TYPE_FIELD, _HEADER_FIELD, _BODY_LENGTH_FIELD = 1, 2, 3
_NUM_ROWS_FIELD = 0


class DamagedError(Exception):
    """The file is not what the format says; `position` = the byte of the message at which that shows."""

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position = position


class Message(NamedTuple):
    """One message: bytes `[start, stop)`, its type, and of a batch its number of rows (else 0)."""

    start: int
    stop: int
    type: int
    num_rows: int


def read_messages(ranges: ByteRanges) -> Iterator[Message]:
    """All messages in order; the first is the schema.

    Raises:
        DamagedError: the file ends inside a message, or a head is not one.
    """
    begin = bytes(ranges.read(0, _FILE_MAGIC_BYTES))
    if begin.startswith(_FEATHER_1_MAGIC):
        raise DamagedError(0, "it is a Feather file of version 1, which is no Arrow file; write it anew")
    is_file = begin.startswith(_FILE_MAGIC)
    at = _FILE_MAGIC_BYTES if is_file else 0
    seen_schema = False
    while True:
        message = _read_message(ranges, at)
        if message is None:
            break
        if (message.type == SCHEMA) == seen_schema:
            raise DamagedError(at, "the schema is missing or comes twice")
        seen_schema = True
        yield message
        at = message.stop
    # A stream may just end; a file has a mark and a footer behind its last message.
    if not seen_schema or (is_file and len(ranges.read(at, 4)) < 4):
        raise DamagedError(at, "the file is empty" if not at else "the file ends too early")


def _read_message(ranges: ByteRanges, at: int) -> Message | None:
    """The message that begins there; None = the end."""
    words = bytes(ranges.read(at, 8))
    if not words:
        return None
    try:
        (length,) = struct.unpack_from("<I", words)
        head_start = at + 4
        if length == _CONTINUES:
            (length,) = struct.unpack_from("<I", words, 4)
            head_start = at + 8
        if not length:
            return None
        if ranges.size_bytes is not None and head_start + length > ranges.size_bytes:
            raise DamagedError(at, "a message begins there that is longer than the file")
        head = ranges.read(head_start, length)
        if len(head) < length:
            raise DamagedError(at, "the file ends inside a message")
        kind, body_bytes, num_rows = _parse_head(head)
    except struct.error as err:
        raise DamagedError(at, "no message begins there") from err
    stop = head_start + length + body_bytes
    if kind not in _KNOWN_TYPES or body_bytes < 0 or num_rows < 0:
        raise DamagedError(at, "no message that an Arrow file can hold begins there")
    if ranges.size_bytes is not None and stop > ranges.size_bytes:
        raise DamagedError(at, f"the file ends {stop - ranges.size_bytes} bytes before its message does")
    return Message(at, stop, kind, num_rows)


def _parse_head(head: memoryview) -> tuple[int, int, int]:
    """Type, bytes of the body, rows (0 if no batch)."""
    (message,) = struct.unpack_from("<I", head)
    kind = _field(head, message, _TYPE_FIELD, "<B")
    body_bytes = _field(head, message, _BODY_LENGTH_FIELD, "<q")
    num_rows = 0
    if kind == BATCH:
        at = _field_position(head, message, _HEADER_FIELD)
        if at is None:
            raise struct.error("a batch without its table")
        num_rows = _field(head, at + struct.unpack_from("<I", head, at)[0], _NUM_ROWS_FIELD, "<q")
    return kind, body_bytes, num_rows


def _field(head: memoryview, table: int, field: int, format: str) -> int:
    at = _field_position(head, table, field)
    return 0 if at is None else struct.unpack_from(format, head, at)[0]


def _field_position(head: memoryview, table: int, field: int) -> int | None:
    """Where a field of a flatbuffer table lies; None = it has its default, 0."""
    # The table begins with the distance back to its list of field positions, which begins with its own size.
    fields = table - struct.unpack_from("<i", head, table)[0]
    if fields < 0:
        raise struct.error("fields before the head")
    (size,) = struct.unpack_from("<H", head, fields)
    entry = 4 + 2 * field
    if entry + 2 > size:
        return None
    (distance,) = struct.unpack_from("<H", head, fields + entry)
    return table + distance if distance else None
