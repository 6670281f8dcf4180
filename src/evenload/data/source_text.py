"""Text files: one UTF-8 document per file. Holds one file at a time."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from gzip import BadGzipFile
from lzma import LZMAError

from evenload.data.files import SourceFile
from evenload.data.record import FILE_END, Record, RecordPosition
from evenload.errors import DataError

BROKEN_COMPRESSION = (BadGzipFile, EOFError, zlib.error, LZMAError)
"""What decompressors raise on damaged bytes; the first is an OSError, so it has to be caught before those."""


@dataclass(frozen=True)
class TextReader:
    """Reader of `format = "text"`."""

    def records(self, file: SourceFile, offset: int, record: int) -> Iterator[Record]:
        """The file as one record.

        Raises:
            DataError: the file cannot be read.
        """
        if offset == FILE_END:
            return
        yield _read_document(file)

    def reread(self, file: SourceFile, positions: Sequence[RecordPosition]) -> Iterator[Record]:
        """The file again, once per position."""
        if positions:
            document = _read_document(file)
            yield from [document] * len(positions)

    def origin(self, file: SourceFile, record: int) -> str:
        """The file's name."""
        return file.name


def _read_document(file: SourceFile) -> Record:
    try:
        with file.open() as stream:
            content = stream.read()
    except BROKEN_COMPRESSION as err:
        return Record(0, 0, FILE_END, None, f"its {file.compression} compression is damaged: {err}")
    except OSError as err:
        raise DataError(f"{file.name} cannot be read: {err}; check the storage it lies on") from err
    try:
        return Record(0, 0, FILE_END, content.decode("utf-8"))
    except UnicodeDecodeError as err:
        return Record(0, 0, FILE_END, None, f"it is not UTF-8: byte 0x{content[err.start]:02x} at offset {err.start}")
