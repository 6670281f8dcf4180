"""`Record` and `RecordReader`: how a format is streamed, from any place in a file.

A file is read in *parts*: part i of n holds a fixed share of its records, found without reading the others, so that
several readers share one large file. Inside a part an *offset* in the format's own terms (bytes, rows, documents)
says where to go on. Nothing else is needed to resume, and nothing of the records themselves is ever saved.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from evenload.data.formats.columns import NeighbourProblem
from evenload.data.source.files import SourceFile
from evenload.errors import DataError

FILE_END = -1
"""`next_offset` after the last record of a part whose reader cannot or need not go on."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The `index`-th of `count` shares of a file. Every record belongs to exactly one of them, in file order."""

    index: int = 0
    count: int = 1

    def range_of(self, size: int) -> range:
        """Which of so many bytes, rows or documents."""
        return range(size * self.index // self.count, size * (self.index + 1) // self.count)


class Record(NamedTuple):
    """A record of one file.

    Args:
        offset: where it begins, in the reader's terms.
        next_offset: where the next one of the part begins, or `FILE_END`.
        values: one value per wanted column, in their order; None where the record cannot be read.
        problem: why it cannot.
    """

    offset: int
    next_offset: int
    values: tuple[Any, ...] | None
    problem: str = ""


def make_records(
    offsets: Sequence[int], values: Sequence[tuple[Any, ...]], problems: Mapping[int, str]
) -> Iterator[Record]:
    """Records that lie one after the other, fast where there are many.

    Args:
        offsets: of every record, and behind the last.
        problems: of those that cannot be read, by index.
    """
    if not problems:
        return map(Record._make, zip(offsets, offsets[1:], values, repeat(""), strict=False))
    readable = [None if index in problems else row for index, row in enumerate(values)]
    said = [problems.get(index, "") for index in range(len(values))]
    return map(Record._make, zip(offsets, offsets[1:], readable, said, strict=False))


class FileFacts(NamedTuple):
    """What a look at a file tells.

    Args:
        columns: names of its columns, or keys of its first records; none where records have no names.
        num_records: how many it holds; None = reading it would tell.
        is_exact: whether they were counted, not estimated.
    """

    columns: tuple[str, ...] = ()
    num_records: int | None = None
    is_exact: bool = True


class RecordReader(ABC):
    """One format's way to stream a file. Holds no open files between calls, so that it can go to another process."""

    def can_share(self, file: SourceFile) -> bool:
        """Whether parts of the file can be read without what lies before them."""
        return True

    @property
    def holds_one(self) -> bool:
        """Every file is one record, at offset 0."""
        return False

    def num_parts(self, file: SourceFile, part_bytes: int) -> int:
        """Into how many parts of about that size the file can be read. Opens nothing; 1 where it cannot be shared."""
        return max(1, -(-(file.size_bytes or 0) // part_bytes)) if self.can_share(file) else 1

    def records(self, file: SourceFile, part: FilePart, offset: int | None = None) -> Iterator[Record]:
        """The part's records from an offset on; None = from the part's beginning. Bounded memory.

        Raises:
            DataError: the file or its index cannot be read, it has no such column or one of another type, a neighbour
                of the columns would change what is trained, or nothing tells where its documents end.
        """
        if offset == FILE_END or (part.index > 0 and not self.can_share(file)):
            return
        try:
            yield from self.read(file, part if self.can_share(file) else FilePart(), offset)
        except NeighbourProblem as problem:
            raise DataError(f"{file.name}: {problem}") from problem

    @abstractmethod
    def look(self, file: SourceFile) -> FileFacts:
        """What a short look at the file tells; raises as `records`."""

    @abstractmethod
    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        """What `records` gives where there is something to read: no `FILE_END`, one part where none can be shared."""

    def origin(self, file: SourceFile, offset: int) -> str:
        """How messages name a record: here by its row, from 1 on. May read the file up to there."""
        return f"{file.name}:row {offset + 1}"
