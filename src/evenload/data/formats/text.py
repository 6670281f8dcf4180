"""Text files: one UTF-8 document per file. Price: the file in memory."""

from collections.abc import Iterator
from dataclasses import dataclass

from evenload.data.formats.record import FILE_END, FileFacts, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile, damaged_compression

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class TextReader(RecordReader):
    """Reader of format "text"; the offset of the document is 0."""

    @property
    def holds_one(self) -> bool:
        return True

    def can_share(self, file: SourceFile) -> bool:
        return False

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        try:
            with file.open() as stream:
                content = stream.read()
            if content.startswith(_LFS_POINTER):
                yield Record(0, FILE_END, None, "it is a pointer of Git LFS, not the file; run git lfs pull")
            else:
                yield Record(0, FILE_END, (content.decode("utf-8"),))
        except UnicodeDecodeError as err:
            problem = f"it is not UTF-8: byte 0x{err.object[err.start]:02x} at offset {err.start}"
            yield Record(0, FILE_END, None, problem)
        except Exception as err:  # decompressors raise classes of their own
            yield Record(0, FILE_END, None, damaged_compression(file, err))

    def look(self, file: SourceFile) -> FileFacts:
        return FileFacts(num_records=1)

    def origin(self, file: SourceFile, offset: int) -> str:
        return file.name
