"""Read JSON lines (`JsonlReader`): one object per line; and `.json` files of lines or of one list (`JsonReader`).

Strict JSON: `NaN`, lone surrogates, bytes that are not UTF-8 and missing keys make a line corrupt. Offsets are bytes,
and a line belongs to the part in which its first byte lies; a compressed file, or one of unknown size, is one part.
Price: one line in memory; a seek to begin. In a list, offsets are items; it is one part and is held in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np

from evenload.data.records import (
    FILE_END,
    KIND_WORDS,
    Column,
    ColumnKind,
    FilePart,
    FileSummary,
    Record,
    RecordReader,
    ValueProblem,
    convert_value,
    holds_several,
    make_record,
    other_values,
)
from evenload.data.sources import SourceFile, damaged_compression
from evenload.errors import DataError

MAX_LINE_BYTES = 1 << 28
"""A longer line is a corrupt record: a file without line ends would fill memory."""

_COUNT_BYTES = 1 << 20
_ROWS_WITH_KEYS = 100  # whose keys are reported
_MOST_TRIES = 64
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TYPES: dict[ColumnKind, Any] = {
    "text": str,
    "messages": list[dict[str, Any]],
    "text_or_messages": str | list[dict[str, Any]],
    "tokens": list[int],
    "mask": list[bool | int | float],
    "any": Any,
    "group": Any,
}


@dataclass(frozen=True)
class JsonlReader(RecordReader):
    """Read files of format "jsonl"."""

    columns: tuple[Column, ...]

    def can_share(self) -> bool:
        return self.file.compression is None and self.file.size_bytes is not None

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        span = part.range_of(self.file.size_bytes or 0)
        start, stop = span.start, None if part.count == 1 else span.stop
        if stop == start:
            return
        decode = _line_decoder(self.columns)
        # Of a part that begins inside the file, the byte before shows whether a line begins there.
        position = max(0, start - 1) if offset is None else offset
        try:
            with self.file.open() as stream:
                stream.seek(position)
                position += _skip_line(stream) if offset is None and start else 0
                while (stop is None or position < stop) and (line := stream.readline(MAX_LINE_BYTES)):
                    after = position + len(line)
                    if len(line) == MAX_LINE_BYTES and line[-1:] != b"\n":
                        after += _skip_line(stream)
                        yield Record(position, after, None, f"the line is longer than {MAX_LINE_BYTES} bytes")
                    elif not line.isspace():
                        yield decode(position, after, line)
                    position = after
        except Exception as err:  # decompressors raise classes of their own
            yield Record(position, FILE_END, None, damaged_compression(self.file, err))

    def summary(self) -> FileSummary:
        try:
            with self.file.open() as stream:
                begin = stream.read(_COUNT_BYTES)
                is_whole = not stream.read(1)
        except DataError:
            raise
        except Exception:  # decompressors raise classes of their own; `read` reports the damage
            return FileSummary()
        if (rows := self._rows(begin.removeprefix(_BYTE_ORDER_MARK), is_whole)) is None:
            return FileSummary()
        keys = tuple(dict.fromkeys(key for row in rows[:_ROWS_WITH_KEYS] for key in _decoded(row) or ()))
        if is_whole:
            return FileSummary(keys, len(rows))
        is_estimated = self.file.compression is None and self.file.size_bytes is not None and len(rows) > 1
        return FileSummary(keys, len(rows) * (self.file.size_bytes or 0) // len(begin) if is_estimated else None, False)

    def _rows(self, begin: bytes, is_whole: bool) -> Sequence[bytes | msgspec.Raw] | None:
        """Return the records in the beginning of a file, or in all of it; None where they are damaged."""
        return [line for line in begin.split(b"\n") if line.strip()]

    def origin(self, offset: int) -> str:
        lines, left = 1, offset
        try:
            with self.file.open() as stream:
                while left > 0 and (content := stream.read(min(left, _COUNT_BYTES))):
                    lines += content.count(b"\n")
                    left -= len(content)
        except Exception:  # another error is being reported
            return f"{self.file.name}, byte {offset}"
        return f"{self.file.name}:{lines}"


@dataclass(frozen=True)
class JsonReader(JsonlReader):
    """Read files of format "json": a list of objects, or one object a line."""

    def can_share(self) -> bool:
        return False

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        if (items := _list_items(self.file)) is None:
            yield from super().read(part, offset)
        elif isinstance(items, str):
            yield Record(0, FILE_END, None, items)
        else:
            decode = _line_decoder(self.columns)
            for index in range(offset or 0, len(items)):
                yield decode(index, index + 1, bytes(items[index]))

    def _rows(self, begin: bytes, is_whole: bool) -> Sequence[bytes | msgspec.Raw] | None:
        if not begin.lstrip().startswith(b"["):
            is_object = begin.lstrip().startswith(b"{") and _decoded(begin.lstrip().split(b"\n", 1)[0]) is None
            return None if is_object else super()._rows(begin, is_whole)
        # Of a longer list the items up to the last "}" that ends one: it is parsed whole only to train it.
        stop, tries = len(begin), 1 if is_whole else _MOST_TRIES
        for _ in range(tries):
            try:
                return msgspec.json.decode(begin[:stop] + (b"" if is_whole else b"]"), type=list[msgspec.Raw])
            except (msgspec.DecodeError, UnicodeDecodeError):
                stop = begin.rfind(b"}", 0, stop - 1) + 1
        return None

    def origin(self, offset: int) -> str:
        is_list = isinstance(_list_items(self.file), list)
        return f"{self.file.name}:item {offset + 1}" if is_list else super().origin(offset)


def _list_items(file: SourceFile) -> list[msgspec.Raw] | str | None:
    """Return the items of a JSON list; None where the file holds lines, a problem where it holds neither."""
    kind: Any = list[msgspec.Raw]
    try:
        with file.open() as stream:
            begin = stream.read(_COUNT_BYTES).removeprefix(_BYTE_ORDER_MARK).lstrip()
            if not begin.startswith(b"["):
                if not begin.startswith(b"{") or _decoded(begin.split(b"\n", 1)[0]) is not None:
                    return None
                kind = dict[str, msgspec.Raw]
            stream.seek(0)
            content = stream.read().removeprefix(_BYTE_ORDER_MARK)
        decoded = msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        # Lines of which the first is broken are reported line by line.
        return f"the JSON list is damaged: {err}" if kind == list[msgspec.Raw] else None
    except Exception as err:  # decompressors raise classes of their own
        return damaged_compression(file, err)
    if isinstance(decoded, list):
        return decoded
    keys = ", ".join(map(repr, decoded))
    return f"the file is one JSON object over several lines, with the keys {keys}; write its records as a list"


def _decoded(line: bytes | msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """Return the object in a line; None where there is none."""
    try:
        return msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _several(line: bytes, columns: Sequence[Column]) -> list[Any] | None:
    """Return the values in a line that holds several sequences, None of one that does not."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(row, dict) or any(column.is_required and column.name not in row for column in columns):
        return None
    is_list = any(column.is_required and holds_several(column.kind, row[column.name]) for column in columns)
    return [row.get(column.name) for column in columns] if is_list else None


def _skip_line(stream: IO[bytes]) -> int:
    skipped = 0
    while line := stream.readline(_COUNT_BYTES):
        skipped += len(line)
        if line[-1:] == b"\n":
            break
    return skipped


def _keys_of_line(position: int, after: int, line: bytes) -> Record:
    row = _decoded(line.removeprefix(_BYTE_ORDER_MARK))
    keys = None if row is None else (tuple(key for key, value in row.items() if bytes(value) != b"null"),)
    return Record(position, after, keys, "the line is not a JSON object" if keys is None else "")


def _described(columns: Sequence[Column]) -> str:
    return " and ".join(f"{KIND_WORDS[one.kind].removeprefix('a ')} under key '{one.name}'" for one in columns)


def _line_decoder(columns: Sequence[Column]) -> Callable[[int, int, bytes], Record]:
    if not columns:
        return _keys_of_line
    # Keys may be no Python names, so fields are numbered.
    keys = {f"value_{index}": column.name for index, column in enumerate(columns)}
    fields: list[Any] = [
        (field, _TYPES[column.kind]) if column.is_required else (field, Any, None)
        for field, column in zip(keys, columns, strict=True)
    ]
    decoder = msgspec.json.Decoder(msgspec.defstruct("JsonlRow", fields, rename=keys))
    required = [column for column in columns if column.is_required]
    others = columns[len(required) :]
    nothing = (None,) * len(others)
    has_numbers = any(column.kind in ("tokens", "mask") for column in required)
    names = ", ".join(f"'{column.name}'" for column in required)

    def decode(position: int, after: int, line: bytes) -> Record:
        if position == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        try:
            row = msgspec.structs.astuple(decoder.decode(line))
            values = row[: len(required)]
            if has_numbers:
                # Faster than `convert_value`, and they are whole numbers already.
                values = tuple(
                    np.array(value, dtype=np.int32) if column.kind == "tokens" else convert_value(column, value)
                    for value, column in zip(values, required, strict=True)
                )
            if (further := row[len(required) :]) != nothing:
                values += other_values(others, further, len(values[0]) if required[0].kind == "tokens" else None)
            return Record(position, after, values)
        except UnicodeDecodeError as err:
            problem = f"a text under {names} is not UTF-8: {err}"
        except OverflowError as err:
            problem = f"a token id under {names} is beyond 32 bits: {err}"
        except msgspec.ValidationError as err:
            # Nearly all records hold one sequence, and those pay nothing for the others.
            row = _several(line, columns)
            if row is not None:
                return make_record(columns, row, position, after)
            keys = _decoded(line) or {}
            lacking = [column for column in required if column.name not in keys]
            why = "" if keys and lacking else f"{err}; "
            problem = f"no {_described(lacking or required)} ({why}its keys are {', '.join(keys) or 'none'})"
        except (msgspec.DecodeError, RecursionError) as err:
            problem = f"the line is not JSON ({err})"
        except ValueProblem as err:
            problem = str(err)
        return Record(position, after, None, problem)

    return decode
