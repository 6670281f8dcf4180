"""Parquet: one record per row, streamed by row groups through pyarrow.

Offsets are rows of the file. Part i of n holds consecutive row groups, their number shared fairly; parts beyond the
number of row groups are empty. Only the wanted columns are read, pages one after the other (never a whole column
chunk), decoded in batches of about 4 MB. A file whose footer is damaged is one problem of its first part, a damaged
row group one of the part it lies in; in both cases the part ends there.

Price: one batch, and a page of every wanted column, in memory. To begin inside a row group costs decoding it up to
there, to begin at all costs reading the footer.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evenload.data.formats.arrow_values import arrow_records, batch_rows, check_schema
from evenload.data.formats.columns import Column, wanted_columns
from evenload.data.formats.failures import is_storage_failure, unreadable
from evenload.data.formats.record import FILE_END, FilePart, Record, RecordReader
from evenload.data.source.files import SourceFile

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class ParquetReader(RecordReader):
    """Reader of format "parquet".

    Args:
        known: what the columns have to be, by name.
    """

    known: Mapping[str, Column]

    def records(
        self, file: SourceFile, part: FilePart, columns: tuple[str, ...], offset: int | None = None
    ) -> Iterator[Record]:
        """The rows of the part's row groups, from that row on."""
        if offset == FILE_END:
            return
        wanted = wanted_columns(columns, self.known)
        row, opened = offset or 0, False
        # Arrow reads local files faster itself.
        source: Any = nullcontext(file.path) if file.is_local else file.open()
        try:
            with source as place, _open_parquet(place) as parquet:
                check_schema(parquet.schema_arrow, wanted, file.name)
                metadata = parquet.metadata
                num_groups = metadata.num_row_groups
                edges = list(accumulate((metadata.row_group(at).num_rows for at in range(num_groups)), initial=0))
                opened = True
                first, last = num_groups * part.index // part.count, num_groups * (part.index + 1) // part.count
                row = max(row, edges[first])
                for group in range(max(first, bisect_right(edges, row) - 1), last):
                    skip = row - edges[group]
                    for batch in parquet.iter_batches(
                        _rows_at_once(metadata.row_group(group), columns),
                        row_groups=[group],
                        columns=list(columns),
                        use_threads=False,
                    ):
                        left = batch.slice(min(skip, len(batch)))
                        skip = max(0, skip - len(batch))
                        yield from arrow_records([left.column(name) for name in columns], wanted, row)
                        row += len(left)
                    if row != edges[group + 1]:
                        raise pa.ArrowInvalid(f"row group {group} ends at row {row} instead of {edges[group + 1]}")
        except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
            if isinstance(err, OSError) and is_storage_failure(err):
                raise unreadable(file, err) from err
            if opened or part.index == 0:
                yield Record(row, FILE_END, None, f"the parquet file is damaged from here on: {err}")


def _open_parquet(place: Any) -> pq.ParquetFile:
    # By default all chunks of a row group are read at once.
    return pq.ParquetFile(place, buffer_size=_BUFFER_BYTES, pre_buffer=False)


def _rows_at_once(group: Any, columns: tuple[str, ...]) -> int:
    num_bytes = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        path = chunk.path_in_schema
        if any(path == name or path.startswith(f"{name}.") for name in columns):
            num_bytes += chunk.total_uncompressed_size
    return batch_rows(group.num_rows, num_bytes)
