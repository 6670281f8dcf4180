"""`PartFiles`: what one part of the mixture is read from: files, their readers, segments.

Made from the configuration alone, so that worker processes make their own and nothing but the configuration (and a
data set object, where one was handed over) goes to them.
"""

from dataclasses import dataclass
from typing import Any

from evenload.data.config import DataConfig
from evenload.data.formats.readers import dataset_file, open_reader
from evenload.data.formats.record import RecordReader
from evenload.data.reading.segments import Segment, cut_segments
from evenload.data.source.files import SourceFile, files_digest, list_files


@dataclass(frozen=True, eq=False, kw_only=True)
class PartFiles:
    """Files of one part of the mixture in their fixed order, a reader of each, and their segments in file order."""

    files: tuple[SourceFile, ...]
    readers: tuple[RecordReader, ...]
    segments: tuple[Segment, ...]

    @property
    def digest(self) -> str:
        """Names and sizes of the files in short, to notice that they changed."""
        return files_digest(self.files)

    def origin(self, file: int, offset: int) -> str:
        return self.readers[file].origin(self.files[file], offset)


def open_part(config: DataConfig, dataset: Any = None) -> PartFiles:
    """The files of a part, or the Hugging Face data set that is read instead of `config.sources`."""
    files = list_files(config) if dataset is None else (dataset_file(dataset),)
    readers = tuple(open_reader(file, config, dataset) for file in files)
    return PartFiles(files=files, readers=readers, segments=cut_segments(files, readers, config.num_streams))
