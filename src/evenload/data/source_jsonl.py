"""JSON lines: one object per line, the text under one key; streamed by lines, byte offsets as cursors.

Lines of nothing but white space are no records. Other keys are passed over without being built.
Strict JSON: `NaN`, lone surrogates and bytes that are not UTF-8 make a line corrupt.
Price: one line in memory; reading again costs one seek per record (in a compressed file a seek reads
everything before it).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from evenload.data.files import SourceFile
from evenload.data.record import FILE_END, Record, RecordPosition
from evenload.data.source_text import BROKEN_COMPRESSION
from evenload.errors import DataError


@dataclass(frozen=True)
class JsonlReader:
    """Reader of `format = "jsonl"`.

    Args:
        text_column: key of the text.
    """

    text_column: str
    _decoder: msgspec.json.Decoder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        row = msgspec.defstruct("JsonlRow", [("text", str)], rename={"text": self.text_column})
        object.__setattr__(self, "_decoder", msgspec.json.Decoder(row))

    def records(self, file: SourceFile, offset: int, record: int) -> Iterator[Record]:
        """The lines from that byte on.

        Raises:
            DataError: the file cannot be read.
        """
        if offset == FILE_END:
            return
        try:
            with file.open() as stream:
                if offset:
                    stream.seek(offset)
                while line := stream.readline():
                    if not line.isspace():
                        yield self._decode(line, offset, record)
                    offset += len(line)
                    record += 1
        except BROKEN_COMPRESSION as err:
            yield Record(offset, record, FILE_END, None, f"the {file.compression} compression is damaged: {err}")
        except OSError as err:
            raise DataError(f"{file.name} cannot be read: {err}; check the storage it lies on") from err

    def reread(self, file: SourceFile, positions: Sequence[RecordPosition]) -> Iterator[Record]:
        """The lines at these byte offsets.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with file.open() as stream:
                for position in positions:
                    stream.seek(position.offset)
                    yield self._decode(stream.readline(), position.offset, position.record)
        except (OSError, *BROKEN_COMPRESSION) as err:
            raise DataError(f"{file.name} cannot be read again: {err}; it must not change during a run") from err

    def origin(self, file: SourceFile, record: int) -> str:
        """File and 1-based line."""
        return f"{file.name}:{record + 1}"

    def _decode(self, line: bytes, offset: int, record: int) -> Record:
        after = offset + len(line)
        try:
            return Record(offset, record, after, self._decoder.decode(line).text)
        except UnicodeDecodeError as err:
            return Record(offset, record, after, None, f"the text under '{self.text_column}' is not UTF-8: {err}")
        except msgspec.ValidationError as err:
            return Record(offset, record, after, None, f"no text under key '{self.text_column}' ({err})")
        except msgspec.DecodeError as err:
            return Record(offset, record, after, None, f"the line is not JSON ({err})")
