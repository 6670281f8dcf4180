"""Parquet: one record per row, streamed by row groups through pyarrow.

Offsets are rows of the file. Part i of n holds consecutive row groups, their number shared fairly; parts beyond the
number of row groups are empty. Only the wanted columns are read, pages one after the other (never a whole column
chunk), decoded in batches of about 4 MB. A file whose footer is damaged is one problem of its first part, a damaged
row group one of the part it lies in; in both cases the part ends there.

Price: one batch, and a page of every wanted column, in memory. To begin inside a row group costs decoding it up to
there, to begin at all costs reading the footer.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evenload.data.formats.arrow_values import arrow_records, batch_rows, check_schema
from evenload.data.formats.columns import Column
from evenload.data.formats.record import FILE_END, FileFacts, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile, is_storage_failure, unreadable

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class ParquetReader(RecordReader):
    """Reader of format "parquet"."""

    columns: tuple[Column, ...]

    def look(self, file: SourceFile) -> FileFacts:
        try:
            with nullcontext(file.path) if file.is_local else file.open() as place, pq.ParquetFile(place) as parquet:
                return FileFacts(tuple(parquet.schema_arrow.names), parquet.metadata.num_rows)
        except pa.ArrowException:
            return FileFacts()  # its reader tells the damage

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        row, opened = offset or 0, False
        # Arrow reads local files faster itself.
        source: Any = nullcontext(file.path) if file.is_local else file.open()
        try:
            # By default all chunks of a row group are read at once.
            with source as place, pq.ParquetFile(place, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet:
                names = [each.name for each in check_schema(parquet.schema_arrow, self.columns, file.name)]
                metadata = parquet.metadata
                num_groups = metadata.num_row_groups
                edges = list(accumulate((metadata.row_group(at).num_rows for at in range(num_groups)), initial=0))
                opened = True
                groups = part.range_of(num_groups)
                row = max(row, edges[groups.start])
                for group in range(max(groups.start, bisect_right(edges, row) - 1), groups.stop):
                    skip = row - edges[group]
                    for batch in parquet.iter_batches(
                        _rows_at_once(metadata.row_group(group), names),
                        row_groups=[group],
                        columns=names,
                        use_threads=False,
                    ):
                        left = batch.slice(min(skip, len(batch)))
                        skip = max(0, skip - len(batch))
                        yield from arrow_records({name: left.column(name) for name in names}, self.columns, row)
                        row += len(left)
                    if row != edges[group + 1]:
                        raise pa.ArrowInvalid(f"row group {group} ends at row {row} instead of {edges[group + 1]}")
        except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
            if isinstance(err, OSError) and is_storage_failure(err):
                raise unreadable(file, err) from err
            if opened or part.index == 0:
                yield Record(row, FILE_END, None, f"the parquet file is damaged from here on: {err}")


def _rows_at_once(group: Any, columns: Sequence[str]) -> int:
    num_bytes = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            num_bytes += chunk.total_uncompressed_size
    return batch_rows(group.num_rows, num_bytes)
