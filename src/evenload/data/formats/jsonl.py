"""JSON lines: one object per line, the wanted keys decoded and checked, the others passed over.

Offsets are bytes. A part is a range of bytes; a line belongs to the part in which its first byte lies, so a part
begins with the first line after its first byte and may end inside the next one's range. A compressed file, or one of
unknown size, is one part. Lines of nothing but white space are no records. Strict JSON: `NaN`, lone surrogates
and bytes that are not UTF-8 make a line corrupt, as does a line without the wanted keys.

Price: one line in memory, at most `MAX_LINE_BYTES`; a seek to begin (in a compressed file, everything before it is
read).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np

from evenload.data.formats.columns import KIND_WORDS, Column, ColumnKind
from evenload.data.formats.record import FILE_END, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile, damaged_compression

MAX_LINE_BYTES = 1 << 28
"""A longer line is a corrupt record: what has no line ends is no JSON lines file, and would fill memory."""

_COUNT_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TYPES: dict[ColumnKind, Any] = {
    "text": str,
    "messages": list[dict[str, Any]],
    "text_or_messages": str | list[dict[str, Any]],
    "tokens": list[int],
}


@dataclass(frozen=True)
class JsonlReader(RecordReader):
    """Reader of format "jsonl"."""

    columns: tuple[Column, ...]

    def can_share(self, file: SourceFile) -> bool:
        return file.compression is None and file.size_bytes is not None

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        span = part.range_of(file.size_bytes or 0)
        start, stop = span.start, None if part.count == 1 else span.stop
        if stop == start:
            return
        decode = _line_decoder(self.columns)
        position = start if offset is None else offset
        try:
            with file.open() as stream:
                if offset is None and start:
                    # The byte before tells whether a line begins here.
                    stream.seek(start - 1)
                    position = start - 1 + _pass_line(stream)
                elif position:
                    stream.seek(position)
                while (stop is None or position < stop) and (line := stream.readline(MAX_LINE_BYTES)):
                    after = position + len(line)
                    if len(line) == MAX_LINE_BYTES and line[-1:] != b"\n":
                        after += _pass_line(stream)
                        yield Record(position, after, None, f"the line is longer than {MAX_LINE_BYTES} bytes")
                    elif not line.isspace():
                        yield decode(position, after, line)
                    position = after
        except Exception as err:  # decompressors raise classes of their own
            yield Record(position, FILE_END, None, damaged_compression(file, err))

    def origin(self, file: SourceFile, offset: int) -> str:
        """File and 1-based line. Reads the file up to there."""
        lines, left = 1, offset
        try:
            with file.open() as stream:
                while left > 0 and (content := stream.read(min(left, _COUNT_BYTES))):
                    lines += content.count(b"\n")
                    left -= len(content)
        except Exception:  # another error is being told, and that the file cannot be read up to here is not it
            return f"{file.name}, byte {offset}"
        return f"{file.name}:{lines}"


def _pass_line(stream: IO[bytes]) -> int:
    """Go to the beginning of the next line; bytes passed."""
    passed = 0
    while line := stream.readline(_COUNT_BYTES):
        passed += len(line)
        if line[-1:] == b"\n":
            break
    return passed


def _line_decoder(wanted: Sequence[Column]) -> Callable[[int, int, bytes], Record]:
    """Makes a record of a line and its place."""
    # Keys may be no Python names, so fields are numbered.
    fields = [(f"value_{index}", _TYPES[column.kind]) for index, column in enumerate(wanted)]
    keys = {name: column.name for (name, _), column in zip(fields, wanted, strict=True)}
    decoder = msgspec.json.Decoder(msgspec.defstruct("JsonlRow", fields, rename=keys))
    is_tokens = [column.kind == "tokens" for column in wanted]
    has_tokens = any(is_tokens)
    names = ", ".join(f"'{column.name}'" for column in wanted)
    described = " and ".join(f"{KIND_WORDS[kind].removeprefix('a ')} under key '{name}'" for name, kind, _ in wanted)

    def decode(position: int, after: int, line: bytes) -> Record:
        if position == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        try:
            values = msgspec.structs.astuple(decoder.decode(line))
            if has_tokens:
                values = tuple(
                    np.array(value, dtype=np.int32) if tokens else value
                    for value, tokens in zip(values, is_tokens, strict=True)
                )
            return Record(position, after, values)
        except UnicodeDecodeError as err:
            problem = f"a text under {names} is not UTF-8: {err}"
        except OverflowError as err:
            problem = f"a token id under {names} is beyond 32 bits: {err}"
        except msgspec.ValidationError as err:
            problem = f"no {described} ({err}{_keys_of(line)})"
        except (msgspec.DecodeError, RecursionError) as err:
            problem = f"the line is not JSON ({err})"
        return Record(position, after, None, problem)

    return decode


def _keys_of(line: bytes) -> str:
    try:
        keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return f"; its keys are {', '.join(keys)}" if keys else "; it has no keys"
