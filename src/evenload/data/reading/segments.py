"""Segments: the shares of files that streams read, assigned to streams anew in every epoch.

Files are cut by size alone, before anything is opened, so that a data set of any size is ready in the time of one
listing, and one large file feeds all streams. Neither the number of ranks nor of workers plays a part: what a stream
reads, and in which order, depends on files, seed and epoch only.

Price: O(segments) per epoch; at most 64 MiB a segment, so 10 TB are 160,000 of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from evenload.data.formats.record import FilePart, RecordReader
from evenload.data.reading.random_order import SEGMENTS, permutation
from evenload.data.source.files import SourceFile

# Small enough that a stream gets several segments of a small data set, so that their permutation mixes it; large enough
# that opening a file at an offset (a request to a remote store) stays rare.
_SEGMENTS_PER_LANE = 4
_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 18, 1 << 26


class Segment(NamedTuple):
    """A share of a file, by the file's index."""

    file: int
    part: FilePart


def cut_segments(files: Sequence[SourceFile], readers: Sequence[RecordReader], num_streams: int) -> tuple[Segment, ...]:
    """All segments in file order."""
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
