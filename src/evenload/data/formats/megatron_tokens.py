"""Megatron's indexed data sets: ids in `<name>.bin`, where they begin and end in `<name>.idx`.

The index: 9 bytes of magic, version (u64, 1), code of the ids' type (u8), number of sequences S and of document edges
D + 1 (both u64); then the sequences' lengths (i32[S]), their first bytes in the `.bin` (i64[S]), and the documents'
edges in sequences (i64[D + 1]). A document is its sequences put together; they lie one after the other in the `.bin`.
What may follow (modes of multimodal sequences) is not read. Offsets are documents, parts hold as many documents.

The index has to fit itself and the `.bin`: sizes, the last byte, and of every run of documents the lengths against
the first bytes. A misfit ends the part with a problem.

Price: 20 bytes of index per sequence, read run by run.

Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py` (the file format).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenload.data.formats.beside import file_beside
from evenload.data.formats.mapped import ByteRanges, ShortFileError, open_ranges, read_numbers
from evenload.data.formats.record import FILE_END, FilePart, Record
from evenload.data.formats.token_records import CHUNK_DOCUMENTS, documents_at_once, token_records
from evenload.data.source.files import SourceFile
from evenload.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_VERSION = 1
# By code; ids as floating point numbers exist in the format and are read where they are whole.
_ID_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")


class _MisfitError(Exception):
    """The index does not fit itself or the `.bin`."""


def read_megatron(file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
    """The part's documents from that one on.

    Raises:
        DataError: a file that cannot be read; no index beside it.
    """
    suffix = ".bin" if file.path.endswith(".bin") else ""
    index_file = file_beside(file, suffix, ".idx")
    if index_file is None:
        raise DataError(
            f"{file.name} has no {index_file_name(file.name, suffix)} beside it, which says where its documents are; "
            "put it there (a bare array of ids can be read as .npy)"
        )
    document, opened = offset or 0, False
    with open_ranges(index_file) as index_ranges, open_ranges(file) as ranges:
        try:
            index = _open_index(index_ranges, ranges.size_bytes)
            opened = True
            start = index.num_documents * part.index // part.count
            stop = index.num_documents * (part.index + 1) // part.count
            document = max(document, start)
            item_bytes = index.dtype.itemsize
            while document < stop:
                edges = index.edges(document, min(stop, document + CHUNK_DOCUMENTS))
                count = documents_at_once(edges, item_bytes)
                ids = read_numbers(ranges, index.dtype, 0, int(edges[0]), int(edges[count]))
                relative = (edges[: count + 1] - edges[0]).tolist()
                yield from token_records(ids, relative, range(document, document + count + 1))
                document += count
                ranges.release(ids.nbytes)
                index_ranges.release(edges.nbytes)
        except (_MisfitError, ShortFileError) as err:
            if opened or part.index == 0:
                yield Record(document, FILE_END, None, f"the index {index_file.name} does not fit the file: {err}")


def index_file_name(name: str, suffix: str) -> str:
    return name.removesuffix(suffix).rsplit("/", 1)[-1] + ".idx"


@dataclass(frozen=True)
class _Index:
    """An open index. `pointers_at`, `documents_at`: bytes at which these arrays begin; `stop`: ids in the `.bin`."""

    ranges: ByteRanges
    dtype: np.dtype
    num_sequences: int
    num_documents: int
    stop: int

    def edges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Edges in ids, int64[stop - start + 1], of documents `[start, stop)`."""
        pointers_at = _HEAD.size + _LENGTH.itemsize * self.num_sequences
        documents_at = pointers_at + _POINTER.itemsize * self.num_sequences
        in_sequences = read_numbers(self.ranges, _POINTER, documents_at, start, stop + 1)
        if in_sequences[0] < 0 or in_sequences[-1] > self.num_sequences or (np.diff(in_sequences) < 0).any():
            raise _MisfitError(f"the sequences of documents {start} to {stop} do not follow each other")
        first, last = int(in_sequences[0]), int(in_sequences[-1])
        lengths = read_numbers(self.ranges, _LENGTH, _HEAD.size, first, last)
        pointers = read_numbers(self.ranges, _POINTER, pointers_at, first, last)
        item_bytes = self.dtype.itemsize
        begin = int(pointers[0]) // item_bytes if len(pointers) else 0
        ids = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=ids[1:])
        ids += begin
        if (lengths < 0).any() or (pointers != ids[:-1] * item_bytes).any() or begin < 0 or ids[-1] > self.stop:
            raise _MisfitError(f"lengths and places of sequences {first} to {last} contradict each other")
        return ids[in_sequences - first]


def _open_index(ranges: ByteRanges, bin_bytes: int | None) -> _Index:
    head = ranges.read(0, _HEAD.size)
    if len(head) < _HEAD.size or bytes(head[: len(_MAGIC)]) != _MAGIC:
        raise _MisfitError("it does not begin as Megatron's do")
    _, version, code, num_sequences, num_edges = _HEAD.unpack(head)
    if version != _VERSION or code not in _ID_TYPES:
        raise _MisfitError(f"version {version} with type {code} is not known")
    dtype = np.dtype(_ID_TYPES[code])
    least_bytes = _HEAD.size + 12 * num_sequences + 8 * num_edges
    if ranges.size_bytes is not None and ranges.size_bytes < least_bytes:
        raise _MisfitError(f"it has {ranges.size_bytes} bytes, {num_sequences} sequences need {least_bytes}")
    stop = 0
    if num_sequences:
        pointers_at = _HEAD.size + _LENGTH.itemsize * num_sequences
        (length,) = read_numbers(ranges, _LENGTH, _HEAD.size, num_sequences - 1, num_sequences)
        (pointer,) = read_numbers(ranges, _POINTER, pointers_at, num_sequences - 1, num_sequences)
        end_bytes = int(pointer) + int(length) * dtype.itemsize
        if bin_bytes is not None and end_bytes != bin_bytes:
            raise _MisfitError(f"its last sequence ends at byte {end_bytes}, the file at {bin_bytes}")
        stop = end_bytes // dtype.itemsize
    elif bin_bytes:
        raise _MisfitError(f"it has no sequences, the file {bin_bytes} bytes")
    if num_edges:
        documents_at = least_bytes - 8 * num_edges
        (first,) = read_numbers(ranges, _POINTER, documents_at, 0, 1)
        (last,) = read_numbers(ranges, _POINTER, documents_at, num_edges - 1, num_edges)
        if first != 0 or last != num_sequences:
            raise _MisfitError(f"its documents hold sequences {first} to {last} of {num_sequences}")
    elif num_sequences:
        raise _MisfitError(f"it has {num_sequences} sequences but no documents")
    return _Index(ranges, dtype, num_sequences, max(0, num_edges - 1), stop)
