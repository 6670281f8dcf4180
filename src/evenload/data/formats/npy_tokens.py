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
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from evenload.data.formats.beside import file_beside
from evenload.data.formats.mapped import ByteRanges, ShortFileError, open_ranges, read_numbers
from evenload.data.formats.record import FILE_END, FilePart, Record
from evenload.data.formats.token_records import CHUNK_DOCUMENTS, documents_at_once, token_records
from evenload.data.source.files import SourceFile
from evenload.errors import DataError

MAX_DOCUMENT_TOKENS = 1 << 27
"""What does not end after so many tokens is a corrupt record: the end id is wrong, and memory would fill."""

_SCAN_TOKENS = 1 << 19
_HEAD_BYTES = 1 << 16


class _ArrayPlace(NamedTuple):
    """Where the numbers of a `.npy` lie."""

    dtype: np.dtype
    at_bytes: int
    size: int


class _DamagedError(Exception):
    """The file, or its file of edges, is not what it should be."""


def read_npy(file: SourceFile, part: FilePart, end_id: int | None, offset: int | None) -> Iterator[Record]:
    """The part's documents from that offset on.

    Raises:
        DataError: a file that cannot be read; neither edges nor an end id.
    """
    edges_file = file_beside(file, ".npy", ".idx.npy")
    if edges_file is None and end_id is None:
        raise DataError(
            f"{file.name}: nothing tells where its documents end; set data.document_end_id to the id that ends them, "
            f"or put their edges beside it as {file.name.removesuffix('.npy').rsplit('/', 1)[-1]}.idx.npy"
        )
    at, opened = offset or 0, False
    with ExitStack() as stack:
        ranges = stack.enter_context(open_ranges(file))
        try:
            place = _find_array(ranges, file.name)
            if edges_file is None:
                opened = True
                records = _read_by_end(ranges, place, end_id or 0, part, offset)
            else:
                edge_ranges = stack.enter_context(open_ranges(edges_file))
                edges_place = _find_edges(edge_ranges, edges_file.name, place.size)
                opened = True
                records = _read_by_edges(ranges, place, edge_ranges, edges_place, part, at)
            for record in records:
                at = record.next_offset
                yield record
        except (_DamagedError, ShortFileError) as err:
            if opened or part.index == 0:
                yield Record(at, FILE_END, None, f"the token file is damaged: {err}")


def npy_origin(file: SourceFile, end_id: int | None, offset: int) -> str:
    if end_id is None or file_beside(file, ".npy", ".idx.npy") is not None:
        return f"{file.name}:document {offset + 1}"
    number = 1
    try:
        with open_ranges(file) as ranges:
            place = _find_array(ranges, file.name)
            for start in range(0, offset, _SCAN_TOKENS):
                ids = read_numbers(ranges, place.dtype, place.at_bytes, start, min(offset, start + _SCAN_TOKENS))
                number += int(np.count_nonzero(ids == end_id))
                ranges.release(ids.nbytes)
    except (_DamagedError, ShortFileError):
        return f"{file.name}, token {offset}"
    return f"{file.name}:document {number}"


def _find_array(ranges: ByteRanges, name: str) -> _ArrayPlace:
    head = io.BytesIO(ranges.read(0, _HEAD_BYTES))
    try:
        version = npy_format.read_magic(head)
        if version not in ((1, 0), (2, 0)):
            raise _DamagedError(f"{name}: version {version} of the format does not hold plain numbers")
        read_head = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read_head(head)
    except _DamagedError:
        raise
    except Exception as err:  # numpy parses the head as Python and raises whatever that raises
        raise _DamagedError(f"{name} does not begin as .npy files do ({err})") from err
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"{name} holds {dtype} of shape {shape}, not a one-dimensional array of whole numbers")
    place = _ArrayPlace(dtype, head.tell(), shape[0])
    end_bytes = place.at_bytes + place.size * dtype.itemsize
    if ranges.size_bytes is not None and ranges.size_bytes < end_bytes:
        raise _DamagedError(f"{name} has {ranges.size_bytes} bytes, {place.size} numbers need {end_bytes}")
    return place


def _find_edges(ranges: ByteRanges, name: str, num_tokens: int) -> _ArrayPlace:
    place = _find_array(ranges, name)
    ends = [int(_read(ranges, place, at, at + 1)[0]) for at in (0, place.size - 1)] if place.size else [0, 0]
    if ends != [0, num_tokens]:
        raise _DamagedError(f"{name} goes from {ends[0]} to {ends[1]}, the file has {num_tokens} tokens")
    return place


def _read_by_edges(
    ranges: ByteRanges,
    place: _ArrayPlace,
    edge_ranges: ByteRanges,
    edges_place: _ArrayPlace,
    part: FilePart,
    document: int,
) -> Iterator[Record]:
    num_documents = max(0, edges_place.size - 1)
    document = max(document, num_documents * part.index // part.count)
    stop = num_documents * (part.index + 1) // part.count
    while document < stop:
        edges = _read(edge_ranges, edges_place, document, min(stop, document + CHUNK_DOCUMENTS) + 1)
        edges = edges.astype(np.int64)
        if (np.diff(edges) < 0).any() or edges[0] < 0 or edges[-1] > place.size:
            raise _DamagedError(f"the edges do not ascend from document {document} on")
        count = documents_at_once(edges, place.dtype.itemsize)
        ids = _read(ranges, place, int(edges[0]), int(edges[count]))
        relative = (edges[: count + 1] - edges[0]).tolist()
        yield from token_records(ids, relative, range(document, document + count + 1))
        document += count
        ranges.release(ids.nbytes)
        edge_ranges.release(edges.nbytes)


def _read_by_end(
    ranges: ByteRanges, place: _ArrayPlace, end_id: int, part: FilePart, offset: int | None
) -> Iterator[Record]:
    start, stop = place.size * part.index // part.count, place.size * (part.index + 1) // part.count
    at = offset
    if at is None:
        # A document begins behind every end; the id before the part tells whether one does at its first.
        at = start if start in (0, place.size) else _next_begin(ranges, place, end_id, start - 1)
    window = _SCAN_TOKENS
    while at < stop:
        ids = _read(ranges, place, at, min(place.size, at + window))
        begins = np.flatnonzero(ids == end_id) + 1
        # Documents that begin behind the part belong to the next one.
        begins = begins[: int(np.searchsorted(begins, stop - at)) + 1]
        is_end = at + len(ids) == place.size
        if is_end and (not len(begins) or begins[-1] < min(len(ids), stop - at)):
            begins = np.append(begins, len(ids))
        if not len(begins):
            if window < MAX_DOCUMENT_TOKENS:
                window *= 2
                continue
            after = _next_begin(ranges, place, end_id, at + len(ids))
            yield Record(at, after, None, f"no id {end_id} ends a document within {window} tokens")
            at = after
            continue
        edges = [0, *begins.tolist()]
        yield from token_records(ids[: edges[-1]], edges, [at + edge for edge in edges])
        at += edges[-1]
        window = _SCAN_TOKENS
        ranges.release(ids.nbytes)


def _next_begin(ranges: ByteRanges, place: _ArrayPlace, end_id: int, at: int) -> int:
    """Where the first document behind the next end begins."""
    for start in range(at, place.size, _SCAN_TOKENS):
        ids = _read(ranges, place, start, min(place.size, start + _SCAN_TOKENS))
        ends = np.flatnonzero(ids == end_id)
        if len(ends):
            return start + int(ends[0]) + 1
        ranges.release(ids.nbytes)
    return place.size


def _read(ranges: ByteRanges, place: _ArrayPlace, start: int, stop: int) -> np.ndarray:
    return read_numbers(ranges, place.dtype, place.at_bytes, start, stop)
