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

from evenload.data.formats.mapped import ByteRanges, DamagedError, NumberArray, open_ranges
from evenload.data.formats.record import FILE_END, FileFacts, FilePart, Record, RecordReader
from evenload.data.formats.token_records import records_by_edges
from evenload.data.source.files import SourceFile
from evenload.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_VERSION = 1
# By code; ids as floating point numbers exist in the format and are read where they are whole.
_ID_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")


class MegatronReader(RecordReader):
    """Reader of a `.bin` of format "memmap"."""

    def read(self, file: SourceFile, part: FilePart, offset: int | None) -> Iterator[Record]:
        index_file = _index_file(file)
        document, opened = offset or 0, False
        with open_ranges(index_file) as index_ranges, open_ranges(file) as ranges:
            try:
                index = _open_index(index_ranges, ranges.size_bytes)
                opened = True
                span = part.range_of(max(0, index.documents.size - 1))
                document = max(document, span.start)
                ids = NumberArray(ranges, index.dtype, 0, index.num_ids)
                for record in records_by_edges(ids, range(document, span.stop), index.edges):
                    document = record.next_offset
                    yield record
            except DamagedError as err:
                if opened or part.index == 0:
                    yield Record(document, FILE_END, None, f"the index {index_file.name} does not fit the file: {err}")

    def look(self, file: SourceFile) -> FileFacts:
        with open_ranges(_index_file(file)) as ranges:
            try:
                return FileFacts(num_records=max(0, _open_index(ranges, file.size_bytes).documents.size - 1))
            except DamagedError:
                return FileFacts()  # its reader tells the damage

    def origin(self, file: SourceFile, offset: int) -> str:
        return f"{file.name}:document {offset + 1}"


def _index_file(file: SourceFile) -> SourceFile:
    suffix = ".bin" if file.path.endswith(".bin") else ""
    if (found := file.beside(suffix, ".idx")) is None:
        raise DataError(
            f"{file.name} has no {file.name.removesuffix(suffix).rsplit('/', 1)[-1]}.idx beside it, which says where "
            "its documents are; put it there (a bare array of ids can be read as .npy)"
        )
    return found


@dataclass(frozen=True)
class _Index:
    """An open index: the type and number of the ids in the `.bin`, and the arrays of the index."""

    dtype: np.dtype
    num_ids: int
    lengths: NumberArray
    pointers: NumberArray
    documents: NumberArray

    def edges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Edges in ids, int64[stop - start + 1], of documents `[start, stop)`."""
        in_sequences = self.documents.read(start, stop + 1)
        if in_sequences[0] < 0 or in_sequences[-1] > self.lengths.size or (np.diff(in_sequences) < 0).any():
            raise DamagedError(f"the sequences of documents {start} to {stop} do not follow each other")
        first, last = int(in_sequences[0]), int(in_sequences[-1])
        lengths, pointers = self.lengths.read(first, last), self.pointers.read(first, last)
        item_bytes = self.dtype.itemsize
        begin = int(pointers[0]) // item_bytes if len(pointers) else 0
        ids = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]) + begin
        if (lengths < 0).any() or (pointers != ids[:-1] * item_bytes).any() or begin < 0 or ids[-1] > self.num_ids:
            raise DamagedError(f"lengths and places of sequences {first} to {last} contradict each other")
        edges = ids[in_sequences - first]
        self.documents.ranges.release(edges.nbytes)
        return edges


def _open_index(ranges: ByteRanges, bin_bytes: int | None) -> _Index:
    head = ranges.read(0, _HEAD.size)
    if len(head) < _HEAD.size or bytes(head[: len(_MAGIC)]) != _MAGIC:
        raise DamagedError("it does not begin as Megatron's do")
    _, version, code, num_sequences, num_edges = _HEAD.unpack(head)
    if version != _VERSION or code not in _ID_TYPES:
        raise DamagedError(f"version {version} with type {code} is not known")
    dtype = np.dtype(_ID_TYPES[code])
    lengths = NumberArray(ranges, _LENGTH, _HEAD.size, num_sequences)
    pointers = NumberArray(ranges, _POINTER, lengths.end_bytes, num_sequences)
    documents = NumberArray(ranges, _POINTER, pointers.end_bytes, num_edges)
    if ranges.size_bytes is not None and ranges.size_bytes < documents.end_bytes:
        raise DamagedError(f"it has {ranges.size_bytes} bytes, {num_sequences} sequences need {documents.end_bytes}")
    num_ids = 0
    if num_sequences:
        (length,), (pointer,) = (column.read(num_sequences - 1, num_sequences) for column in (lengths, pointers))
        end_bytes = int(pointer) + int(length) * dtype.itemsize
        if bin_bytes is not None and end_bytes != bin_bytes:
            raise DamagedError(f"its last sequence ends at byte {end_bytes}, the file at {bin_bytes}")
        num_ids = end_bytes // dtype.itemsize
    elif bin_bytes:
        raise DamagedError(f"it has no sequences, the file {bin_bytes} bytes")
    if num_edges:
        (first,), (last,) = documents.read(0, 1), documents.read(num_edges - 1, num_edges)
        if first != 0 or last != num_sequences:
            raise DamagedError(f"its documents hold sequences {first} to {last} of {num_sequences}")
    elif num_sequences:
        raise DamagedError(f"it has {num_sequences} sequences but no documents")
    return _Index(dtype, num_ids, lengths, pointers, documents)
