"""`DocumentSource`: all files of a run as streams of records, and records read again by position."""

from collections.abc import Iterator, Sequence

from evenload.data.config import DataConfig
from evenload.data.files import FileFormat, SourceFile, files_digest, list_files
from evenload.data.record import Record, RecordPosition, RecordReader
from evenload.data.source_jsonl import JsonlReader
from evenload.data.source_parquet import ParquetReader
from evenload.data.source_text import TextReader
from evenload.errors import DataError


class DocumentSource:
    """The files of `config.sources`, listed once.

    Raises:
        ConfigError: see `list_files`.
    """

    def __init__(self, config: DataConfig) -> None:
        self.files: tuple[SourceFile, ...] = list_files(config)
        self._readers: dict[FileFormat, RecordReader] = {
            "text": TextReader(),
            "jsonl": JsonlReader(config.text_column),
            "parquet": ParquetReader(config.text_column),
        }

    @property
    def digest(self) -> str:
        """Names and sizes of the files in short, to notice that they changed."""
        return files_digest(self.files)

    def records(self, file: int, offset: int = 0, record: int = 0) -> Iterator[Record]:
        """Stream a file from a position on.

        Raises:
            DataError: the file cannot be read.
        """
        return self._reader(file).records(self.files[file], offset, record)

    def reread(self, positions: Sequence[RecordPosition]) -> dict[RecordPosition, str]:
        """Texts of records that were read before; each file is opened once, in order.

        Raises:
            DataError: a file changed so that a record is not there any more.
        """
        texts: dict[RecordPosition, str] = {}
        wanted: dict[int, list[RecordPosition]] = {}
        for position in sorted(set(positions), key=lambda position: (position.file, position.offset)):
            wanted.setdefault(position.file, []).append(position)
        for file, members in wanted.items():
            found = self._reader(file).reread(self.files[file], members)
            for position, record in zip(members, found, strict=True):
                if record.text is None:
                    raise DataError(
                        f"{self.origin(position)} was readable before and is not now: {record.problem}; "
                        "the sources must not change between save and resume"
                    )
                texts[position] = record.text
        return texts

    def origin(self, position: RecordPosition) -> str:
        """How messages name a record: file, and line or row."""
        return self._reader(position.file).origin(self.files[position.file], position.record)

    def _reader(self, file: int) -> RecordReader:
        return self._readers[self.files[file].format]
