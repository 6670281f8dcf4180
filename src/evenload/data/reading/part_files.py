"""`PartFiles`: what one part of the mixture is read from: files, their readers, and segments that streams share.

Segments are shares of files, assigned to streams anew in every epoch. Files are cut by size alone, before anything is
opened, so that a data set of any size is ready in the time of one listing, and one large file feeds all streams.
Neither the number of ranks nor of workers plays a part: what a stream reads, and in which order, depends on files, seed
and epoch only.

Price: O(segments) per epoch; at most 64 MiB a segment, so 10 TB are 160,000 of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evenload.data.config import DataConfig
from evenload.data.formats.readers import dataset_file, open_reader
from evenload.data.formats.record import FilePart, RecordReader
from evenload.data.reading.random_order import SEGMENTS, permutation
from evenload.data.source.files import SourceFile, list_files

# Small enough that a stream gets several segments of a small data set, so that their permutation mixes it; large enough
# that opening a file at an offset (a request to a remote store) stays rare.
_SEGMENTS_PER_LANE = 4
_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 18, 1 << 26


class Segment(NamedTuple):
    """A share of a file, by the file's index."""

    file: int
    part: FilePart


@dataclass(frozen=True, eq=False, kw_only=True)
class PartFiles:
    """Files of one part of the mixture in their fixed order, a reader of each, and their segments in file order."""

    files: tuple[SourceFile, ...]
    readers: tuple[RecordReader, ...]
    segments: tuple[Segment, ...]

    def origin(self, file: int, offset: int) -> str:
        return self.readers[file].origin(self.files[file], offset)


def open_part(config: DataConfig, dataset: Any = None) -> PartFiles:
    """The files of a part, or the Hugging Face data set that is read instead of `config.sources`."""
    files = list_files(config) if dataset is None else (dataset_file(dataset),)
    readers = tuple(open_reader(file, config, dataset) for file in files)
    return PartFiles(files=files, readers=readers, segments=_cut_segments(files, readers, config.num_streams))


def _cut_segments(
    files: Sequence[SourceFile], readers: Sequence[RecordReader], num_streams: int
) -> tuple[Segment, ...]:
    total_bytes = sum(file.size_bytes or 0 for file in files)
    part_bytes = min(max(total_bytes // (_SEGMENTS_PER_LANE * num_streams), _SMALLEST_BYTES), _LARGEST_BYTES)
    segments: list[Segment] = []
    for index, (file, reader) in enumerate(zip(files, readers, strict=True)):
        count = reader.num_parts(file, part_bytes)
        segments += [Segment(index, FilePart(part, count)) for part in range(count)]
    return tuple(segments)


def assign_segments(
    segments: Sequence[Segment], num_streams: int, *, shuffled: bool, seed: int, epoch: int, part: int
) -> tuple[tuple[Segment, ...], ...]:
    """The segments of every stream, in the order in which it reads them.

    Args:
        part: number of the part of the mixture; keeps parts of equal shape from the same order.
    """
    order = permutation(len(segments), seed, epoch, SEGMENTS, part, 0) if shuffled else range(len(segments))
    assigned = [segments[index] for index in order]
    return tuple(tuple(assigned[stream::num_streams]) for stream in range(num_streams))
