"""Read token files, format "memmap": documents that lie one after the other in an array of token ids, in runs of 4 MB.

Of Megatron's files offsets are documents, and parts hold equally many; of a `.npy` offsets are tokens, and a document
belongs to the part in whose tokens it begins.

Megatron's `<name>.bin` holds ids, its `<name>.idx`: 9 bytes of magic, version (u64, 1), code of the ids' type (u8),
number of sequences S and of document edges D + 1 (both u64); then the sequences' lengths (i32[S]), their first bytes in
the `.bin` (i64[S]), and the documents' edges in sequences (i64[D + 1]). Source: Megatron-LM,
`megatron/core/datasets/indexed_dataset.py`.

A `.npy` is an array of ids, in which `DataConfig.document_end_id` ends a document and belongs to it.
"""

import io
import struct
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from evenload.data.records import FILE_END, FilePart, FileSummary, Record, RecordReader, cut_ids, make_records
from evenload.data.sources import SourceFile, refuse_storage_failure
from evenload.errors import DataError

CHUNK_BYTES = 1 << 22
"""Documents are read and converted in runs of about so many bytes, or one by one where they are longer."""

MAX_DOCUMENT_TOKENS = 1 << 27
"""A longer document is a corrupt record: the end id is wrong, and memory would fill."""

_SCAN_TOKENS = 1 << 19
_HEAD_BYTES = 1 << 16
_CHUNK_DOCUMENTS = 4096
_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_VERSION = 1
# By code; ids as floating point numbers exist in the format and are read where they are whole.
_ID_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")


class DamagedError(Exception):
    """The file ends too early, or does not hold what it should."""


class _OpenFile(NamedTuple):
    """The bytes of an open file; `size_bytes` is None where the storage does not know."""

    stream: IO[bytes]
    size_bytes: int | None

    def read(self, start: int, count: int) -> bytes:
        """Read bytes `[start, start + count)`; fewer at the end of the file."""
        self.stream.seek(start)
        return self.stream.read(count)


@contextmanager
def _opened(file: SourceFile) -> Iterator[_OpenFile]:
    with file.open() as stream:
        try:
            yield _OpenFile(stream, stream.seek(0, 2) if file.is_local else file.size_bytes)
        except OSError as err:
            refuse_storage_failure(file, err)
            raise


@dataclass(frozen=True, eq=False)
class _NumberArray:
    """`size` numbers that begin at a byte of an open file."""

    source: _OpenFile
    dtype: np.dtype
    at_bytes: int
    size: int

    @property
    def end_bytes(self) -> int:
        return self.at_bytes + self.size * self.dtype.itemsize

    def read(self, start: int, stop: int) -> NDArray[Any]:
        at, wanted = self.at_bytes + start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize
        content = self.source.read(at, wanted)
        if len(content) != wanted:
            raise DamagedError(f"it ends at byte {at + len(content)}")
        return np.frombuffer(content, dtype=self.dtype)


class _TokenReader(RecordReader):
    """Read documents from token files; `damage` is how messages begin where the file is damaged."""

    damage: str

    @abstractmethod
    def documents(self, stack: ExitStack, part: FilePart, offset: int | None) -> Iterator[Record]:
        """Open the files and check them; return the records of a part."""

    def read(self, part: FilePart, offset: int | None) -> Iterator[Record]:
        at, opened = offset or 0, False
        with ExitStack() as stack:
            try:
                records = self.documents(stack, part, offset)
                opened = True
                for record in records:
                    at = record.next_offset
                    yield record
            except DamagedError as err:
                # Damage outside of all documents is reported with the first part alone.
                if opened or part.index == 0:
                    problem = f"{self.damage.format(stem=self.file.name.removesuffix('.bin'))}: {err}"
                    yield Record(at, FILE_END, None, problem)

    def origin(self, offset: int) -> str:
        return f"{self.file.name}:document {offset + 1}"


def _records_by_edges(ids: _NumberArray, documents: range, first: int, index: "_Index") -> Iterator[Record]:
    """Read documents from number `first` on, together as many as `CHUNK_BYTES` hold, at least one."""
    document = max(first, documents.start)
    while document < documents.stop:
        edges = index.edges(document, min(documents.stop, document + _CHUNK_DOCUMENTS))
        most = edges[0] + CHUNK_BYTES // ids.dtype.itemsize
        count = max(1, int(np.searchsorted(edges, most, side="right")) - 1)
        chunk = ids.read(int(edges[0]), int(edges[count]))
        tokens, problems = cut_ids(chunk, edges[: count + 1] - edges[0])
        yield from make_records(range(document, document + count + 1), [(row,) for row in tokens], problems)
        document += count


class MegatronReader(_TokenReader):
    """Read a `.bin` of format "memmap"."""

    damage = "the index {stem}.idx does not fit the file"

    def documents(self, stack: ExitStack, part: FilePart, offset: int | None) -> Iterator[Record]:
        index_file = _index_file(self.file)
        index_source, source = stack.enter_context(_opened(index_file)), stack.enter_context(_opened(self.file))
        index = _open_index(index_source, source.size_bytes)
        ids = _NumberArray(source, index.dtype, 0, index.num_ids)
        return _records_by_edges(ids, part.range_of(index.num_documents), offset or 0, index)

    def summary(self) -> FileSummary:
        with _opened(_index_file(self.file)) as source, suppress(DamagedError):  # which `read` reports
            return FileSummary(num_records=_open_index(source, self.file.size_bytes).num_documents)
        return FileSummary()


def _index_file(file: SourceFile) -> SourceFile:
    suffix = ".bin" if file.path.endswith(".bin") else ""
    if (index := file.sibling(suffix, ".idx")) is None:
        raise DataError(
            f"{file.name} has no {file.name.removesuffix(suffix).rsplit('/', 1)[-1]}.idx next to it, which holds where "
            "its documents are; put it there (a bare array of ids can be read as .npy)"
        )
    return index


@dataclass(frozen=True)
class _Index:
    """An open index: type and number of the ids in the `.bin`, and the arrays of the index."""

    dtype: np.dtype
    num_ids: int
    lengths: _NumberArray
    pointers: _NumberArray
    documents: _NumberArray

    @property
    def num_documents(self) -> int:
        return max(0, self.documents.size - 1)

    def edges(self, start: int, stop: int) -> NDArray[np.int64]:
        """Read the edges in ids, int64[stop - start + 1], of documents `[start, stop)`."""
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
        return ids[in_sequences - first]


def _open_index(source: _OpenFile, bin_bytes: int | None) -> _Index:
    head = source.read(0, _HEAD.size)
    if len(head) < _HEAD.size or bytes(head[: len(_MAGIC)]) != _MAGIC:
        raise DamagedError("it does not begin as Megatron's do")
    _, version, code, num_sequences, num_edges = _HEAD.unpack(head)
    if version != _VERSION or code not in _ID_TYPES:
        raise DamagedError(f"version {version} with type {code} is not known")
    dtype = np.dtype(_ID_TYPES[code])
    lengths = _NumberArray(source, _LENGTH, _HEAD.size, num_sequences)
    pointers = _NumberArray(source, _POINTER, lengths.end_bytes, num_sequences)
    documents = _NumberArray(source, _POINTER, pointers.end_bytes, num_edges)
    if source.size_bytes is not None and source.size_bytes < documents.end_bytes:
        raise DamagedError(f"it has {source.size_bytes} bytes, {num_sequences} sequences need {documents.end_bytes}")
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


@dataclass(frozen=True)
class NpyReader(_TokenReader):
    """Read a `.npy` of format "memmap"; `document_end_id` as in `DataConfig`."""

    document_end_id: int | None
    damage = "the token file is damaged"

    def documents(self, stack: ExitStack, part: FilePart, offset: int | None) -> Iterator[Record]:
        if self.document_end_id is None:
            fix = "set data.document_end_id to the id that ends them"
            raise DataError(f"{self.file.name}: nothing marks where its documents end; {fix}")
        ids = _open_array(stack.enter_context(_opened(self.file)), self.file.name)
        return _records_by_end(ids, self.document_end_id, part, offset)

    def summary(self) -> FileSummary:
        return FileSummary()

    def origin(self, offset: int) -> str:
        return f"{self.file.name}, token {offset}"


def _open_array(source: _OpenFile, name: str) -> _NumberArray:
    head = io.BytesIO(source.read(0, _HEAD_BYTES))
    try:
        # Later versions of the format do not hold plain numbers.
        read_head = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
        shape, _, dtype = read_head[npy_format.read_magic(head)](head)
    except Exception as err:  # numpy parses the head as Python and raises whatever that raises
        raise DamagedError(f"{name} does not begin as .npy files do ({err})") from err
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"{name} holds {dtype} of shape {shape}, not a one-dimensional array of whole numbers")
    array = _NumberArray(source, dtype, head.tell(), shape[0])
    if source.size_bytes is not None and source.size_bytes < array.end_bytes:
        raise DamagedError(f"{name} has {source.size_bytes} bytes, {array.size} numbers need {array.end_bytes}")
    return array


def _records_by_end(array: _NumberArray, end_id: int, part: FilePart, offset: int | None) -> Iterator[Record]:
    span = part.range_of(array.size)
    start, stop = span.start, span.stop
    # A document begins after every end; the id before the part shows whether one does at its first.
    at = offset
    if at is None:
        at = start if start in (0, array.size) else _next_begin(array, end_id, start - 1)
    window = _SCAN_TOKENS
    while at < stop:
        ids = array.read(at, min(array.size, at + window))
        begins = np.flatnonzero(ids == end_id) + 1
        # Documents that begin after the part belong to the next one.
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
        tokens, problems = cut_ids(ids[: begins[-1]], edges := np.append(0, begins))
        yield from make_records((at + edges).tolist(), [(row,) for row in tokens], problems)
        at += int(begins[-1])
        window = _SCAN_TOKENS


def _next_begin(array: _NumberArray, end_id: int, at: int) -> int:
    for start in range(at, array.size, _SCAN_TOKENS):
        ids = array.read(start, min(array.size, start + _SCAN_TOKENS))
        ends = np.flatnonzero(ids == end_id)
        if len(ends):
            return start + int(ends[0]) + 1
    return array.size
