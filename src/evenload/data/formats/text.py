"""Text files: one UTF-8 document per file. Price: the file in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from evenload.data.formats.failures import damaged_compression
from evenload.data.formats.record import FILE_END, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile
from evenload.errors import DataError


@dataclass(frozen=True)
class TextReader(RecordReader):
    """Reader of format "text"; the offset of the document is 0."""

    def num_parts(self, file: SourceFile, part_bytes: int) -> int:
        return 1

    def records(
        self, file: SourceFile, part: FilePart, columns: tuple[str, ...], offset: int | None = None
    ) -> Iterator[Record]:
        """The file as one record, in the first part."""
        if len(columns) != 1:
            raise DataError(f"{file.name} is a text file and has one column, not {', '.join(columns)}")
        if part.index == 0 and offset != FILE_END:
            yield _read_document(file)

    def origin(self, file: SourceFile, offset: int) -> str:
        return file.name


def _read_document(file: SourceFile) -> Record:
    try:
        with file.open() as stream:
            content = stream.read()
    except Exception as err:  # decompressors raise classes of their own
        return Record(0, FILE_END, None, damaged_compression(file, err))
    try:
        return Record(0, FILE_END, (content.decode("utf-8"),))
    except UnicodeDecodeError as err:
        return Record(0, FILE_END, None, f"it is not UTF-8: byte 0x{content[err.start]:02x} at offset {err.start}")
