"""`Record`: one raw document as a source gives it, and where to find it again.

State never stores text or tokens: a position is enough to read the same record again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from evenload.data.files import SourceFile
from evenload.types.base import Frozen

FILE_END = -1
"""Offset after the last record of a file whose reader cannot or need not go on."""


class RecordPosition(Frozen, array_like=True):
    """Where a record stands.

    Args:
        file: index into the sorted list of files.
        offset: decompressed bytes (jsonl) or rows (parquet) before it; 0 in a text file.
        record: 0-based line (jsonl) or row (parquet); what messages show.
    """

    file: int
    offset: int
    record: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record of one file.

    Args:
        offset, record: as in `RecordPosition`.
        next_offset: where the next record of the file begins, or `FILE_END`.
        text: None where the record cannot be read.
        problem: why it cannot.
    """

    offset: int
    record: int
    next_offset: int
    text: str | None
    problem: str = ""


class RecordReader(Protocol):
    """One format's way to stream a file, and to find records again."""

    def records(self, file: SourceFile, offset: int, record: int) -> Iterator[Record]:
        """The records from that offset on. Holds one record or one row group at a time."""
        ...

    def reread(self, file: SourceFile, positions: Sequence[RecordPosition]) -> Iterator[Record]:
        """The records at these positions, which ascend; the file is opened once."""
        ...

    def origin(self, file: SourceFile, record: int) -> str:
        """How messages name a record, for example `docs.jsonl:17`."""
        ...
