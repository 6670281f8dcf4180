"""Tokens in a `.npy`: a one-dimensional array of ids, and what tells its documents apart.

Either `<name>.idx.npy` lies beside it, edges of documents in tokens (whole numbers [D + 1], from 0 to the number of
tokens, ascending); then offsets are documents and parts hold as many documents. Or `DataConfig.document_end_id` is
the id that ends a document and belongs to it; then offsets are tokens, and a document belongs to the part in whose
range of tokens it begins, so a part or an offset is found without reading what lies before it. Where both are
given, the edges count. Ids after the last end are a document too.

Price: with an end id, every id is compared with it once (1 ns); a run of `_SCAN_TOKENS` in memory, or a document
where it is longer, up to `MAX_DOCUMENT_TOKENS`.

Source of the file format: NumPy enhancement proposal 1.
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from evenload.data.formats.mapped import ByteRanges, DamagedError, NumberArray, open_ranges
from evenload.data.formats.record import FILE_END, FileFacts, FilePart, Record, RecordReader
from evenload.data.formats.token_records import records_by_edges, token_records
from evenload.data.source.files import SourceFile
from evenload.errors import DataError

MAX_DOCUMENT_TOKENS = 1 << 27
"""What does not end after so many tokens is a corrupt record: the end id is wrong, and memory would fill."""

_SCAN_TOKENS = 1 << 19
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class NpyReader(RecordReader):
    """Reader of a `.npy` of format "memmap".

    Args:
        document_end_id: as in `DataConfig`.
    """

    document_end_id: int | None

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        edges_file, end_id = file.beside(".npy", ".idx.npy"), self.document_end_id
        if edges_file is None and end_id is None:
            raise DataError(
                f"{file.name}: nothing tells where its documents end; set data.document_end_id to the id that ends "
                f"them, or put their edges beside it as {file.name.removesuffix('.npy').rsplit('/', 1)[-1]}.idx.npy"
            )
        at, opened = offset or 0, False
        with ExitStack() as stack:
            try:
                array = _find_array(stack.enter_context(open_ranges(file)), file.name)
                if edges_file is None:
                    records = _read_by_end(array, end_id or 0, part, offset)
                else:
                    edge_ranges = stack.enter_context(open_ranges(edges_file))
                    edges = _find_edges(edge_ranges, edges_file.name, array.size)
                    records = _read_by_edges(array, edges, part, at)
                opened = True
                for record in records:
                    at = record.next_offset
                    yield record
            except DamagedError as err:
                if opened or part.index == 0:
                    yield Record(at, FILE_END, None, f"the token file is damaged: {err}")

    def look(self, file: SourceFile) -> FileFacts:
        if (edges_file := file.beside(".npy", ".idx.npy")) is None:
            return FileFacts()
        with open_ranges(edges_file) as ranges:
            try:
                return FileFacts(num_records=max(0, _find_array(ranges, edges_file.name).size - 1))
            except DamagedError:
                return FileFacts()  # its reader tells the damage

    def origin(self, file: SourceFile, offset: int) -> str:
        """File and 1-based document. May read the file up to there."""
        if self.document_end_id is None or file.beside(".npy", ".idx.npy") is not None:
            return f"{file.name}:document {offset + 1}"
        number = 1
        try:
            with open_ranges(file) as ranges:
                array = _find_array(ranges, file.name)
                for start in range(0, offset, _SCAN_TOKENS):
                    ids = array.read(start, min(offset, start + _SCAN_TOKENS))
                    number += int(np.count_nonzero(ids == self.document_end_id))
                    ranges.release(ids.nbytes)
        except DamagedError:
            return f"{file.name}, token {offset}"
        return f"{file.name}:document {number}"


def _find_array(ranges: ByteRanges, name: str) -> NumberArray:
    head = io.BytesIO(ranges.read(0, _HEAD_BYTES))
    try:
        version = npy_format.read_magic(head)
        if version not in ((1, 0), (2, 0)):
            raise DamagedError(f"{name}: version {version} of the format does not hold plain numbers")
        read_head = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read_head(head)
    except DamagedError:
        raise
    except Exception as err:  # numpy parses the head as Python and raises whatever that raises
        raise DamagedError(f"{name} does not begin as .npy files do ({err})") from err
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"{name} holds {dtype} of shape {shape}, not a one-dimensional array of whole numbers")
    array = NumberArray(ranges, dtype, head.tell(), shape[0])
    if ranges.size_bytes is not None and ranges.size_bytes < array.end_bytes:
        raise DamagedError(f"{name} has {ranges.size_bytes} bytes, {array.size} numbers need {array.end_bytes}")
    return array


def _find_edges(ranges: ByteRanges, name: str, num_tokens: int) -> NumberArray:
    edges = _find_array(ranges, name)
    ends = [int(edges.read(at, at + 1)[0]) for at in (0, edges.size - 1)] if edges.size else [0, 0]
    if ends != [0, num_tokens]:
        raise DamagedError(f"{name} goes from {ends[0]} to {ends[1]}, the file has {num_tokens} tokens")
    return edges


def _read_by_edges(array: NumberArray, edges: NumberArray, part: FilePart, document: int) -> Iterator[Record]:
    def edges_of(start: int, stop: int) -> NDArray[np.int64]:
        found = edges.read(start, stop + 1).astype(np.int64)
        if (np.diff(found) < 0).any() or found[0] < 0 or found[-1] > array.size:
            raise DamagedError(f"the edges do not ascend from document {start} on")
        edges.ranges.release(found.nbytes)
        return found

    documents = part.range_of(max(0, edges.size - 1))
    return records_by_edges(array, range(max(document, documents.start), documents.stop), edges_of)


def _read_by_end(array: NumberArray, end_id: int, part: FilePart, offset: int | None) -> Iterator[Record]:
    span = part.range_of(array.size)
    start, stop = span.start, span.stop
    at = offset
    if at is None:
        # A document begins behind every end; the id before the part tells whether one does at its first.
        at = start if start in (0, array.size) else _next_begin(array, end_id, start - 1)
    window = _SCAN_TOKENS
    while at < stop:
        ids = array.read(at, min(array.size, at + window))
        begins = np.flatnonzero(ids == end_id) + 1
        # Documents that begin behind the part belong to the next one.
        begins = begins[: int(np.searchsorted(begins, stop - at)) + 1]
        is_end = at + len(ids) == array.size
        if is_end and (not len(begins) or begins[-1] < min(len(ids), stop - at)):
            begins = np.append(begins, len(ids))
        if not len(begins):
            if window < MAX_DOCUMENT_TOKENS:
                window *= 2
                continue
            after = _next_begin(array, end_id, at + len(ids))
            yield Record(at, after, None, f"no id {end_id} ends a document within {window} tokens")
            at = after
            continue
        edges = [0, *begins.tolist()]
        yield from token_records(ids[: edges[-1]], edges, [at + edge for edge in edges])
        at += edges[-1]
        window = _SCAN_TOKENS
        array.ranges.release(ids.nbytes)


def _next_begin(array: NumberArray, end_id: int, at: int) -> int:
    """Where the first document behind the next end begins."""
    for start in range(at, array.size, _SCAN_TOKENS):
        ids = array.read(start, min(array.size, start + _SCAN_TOKENS))
        ends = np.flatnonzero(ids == end_id)
        if len(ends):
            return start + int(ends[0]) + 1
        array.ranges.release(ids.nbytes)
    return array.size
