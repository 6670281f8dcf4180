"""Parquet: one document per row, streamed by row groups through pyarrow, rows as cursors.

Only the text column is read. Price: one row group of that column in memory at most (pages are decoded
in small batches); reading records again decodes each row group that holds one of them once.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from evenload.data.files import SourceFile
from evenload.data.record import FILE_END, Record, RecordPosition
from evenload.errors import DataError

_BATCH_ROWS = 256  # rows decoded at a time: small, so that long documents do not pile up


@dataclass(frozen=True)
class ParquetReader:
    """Reader of `format = "parquet"`.

    Args:
        text_column: column of the text; any Arrow string type.
    """

    text_column: str

    def records(self, file: SourceFile, offset: int, record: int) -> Iterator[Record]:
        """The rows from that row on.

        Raises:
            DataError: the file cannot be read, or has no such text column.
        """
        if offset == FILE_END:
            return
        row = offset
        try:
            with file.open() as stream:
                parquet, edges = self._open(file, stream)
                first = bisect_right(edges, offset) - 1
                for group in range(first, parquet.metadata.num_row_groups):
                    skip, row = max(0, offset - edges[group]), max(offset, edges[group])
                    for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[self.text_column]):
                        for value in batch.column(0).slice(min(skip, len(batch))):
                            yield self._record(value, row)
                            row += 1
                        skip = max(0, skip - len(batch))
        except pa.ArrowInvalid as err:
            yield Record(row, row, FILE_END, None, f"the parquet file is damaged: {err}")
        except OSError as err:
            raise DataError(f"{file.name} cannot be read: {err}; check the storage it lies on") from err

    def reread(self, file: SourceFile, positions: Sequence[RecordPosition]) -> Iterator[Record]:
        """The rows at these positions.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with file.open() as stream:
                parquet, edges = self._open(file, stream)
                for group, members in groupby(positions, lambda position: bisect_right(edges, position.offset) - 1):
                    column = parquet.read_row_group(group, columns=[self.text_column]).column(0)
                    for position in members:
                        yield self._record(column[position.offset - edges[group]], position.offset)
        except (OSError, IndexError, pa.ArrowInvalid) as err:
            raise DataError(f"{file.name} cannot be read again: {err}; it must not change during a run") from err

    def origin(self, file: SourceFile, record: int) -> str:
        """File and 0-based row."""
        return f"{file.name}:row {record}"

    def _open(self, file: SourceFile, stream: IO[bytes]) -> tuple[pq.ParquetFile, list[int]]:
        """The file and the first row of every row group; one more entry for the end."""
        parquet = pq.ParquetFile(stream)
        schema = parquet.schema_arrow
        if self.text_column not in schema.names:
            raise DataError(
                f"{file.name} has no column '{self.text_column}', only {', '.join(schema.names)}; set data.text_column"
            )
        kind = schema.field(self.text_column).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{file.name}: column '{self.text_column}' is {kind}, not text; set data.text_column")
        metadata = parquet.metadata
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        return parquet, list(accumulate(sizes, initial=0))

    def _record(self, value: pa.Scalar, row: int) -> Record:
        try:
            text = value.as_py()
        except UnicodeDecodeError as err:
            return Record(row, row, row + 1, None, f"the text in '{self.text_column}' is not UTF-8: {err}")
        if text is None:
            return Record(row, row, row + 1, None, f"column '{self.text_column}' is null")
        return Record(row, row, row + 1, text)
