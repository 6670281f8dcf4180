"""`open_ranges`: any byte range of a file: of a local one through memory mapping, of a remote one by reading it.

Mapped pages count as memory of the process until somebody else needs it; `release` gives them back, so that reading a
file of any size does not look like a leak. Arrays on released pages stay valid: touched again, their pages are mapped
again. A mapped file must not be made shorter meanwhile (the process would be killed), as ever with maps.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from evenload.data.source.files import SourceFile, unreadable

# The kernel maps so many bytes around a page that is touched.
_MAPPED_AT_ONCE_BYTES = 1 << 16
_RELEASE_BYTES = 1 << 23


class ByteRanges:
    """Random access to the bytes of an open file, by seeking.

    Args:
        size_bytes: of the file; None = unknown.
    """

    def __init__(self, stream: IO[bytes], size_bytes: int | None) -> None:
        self.size_bytes = size_bytes
        self._stream = stream

    def read(self, start: int, count: int) -> memoryview:
        """Bytes `[start, start + count)`; fewer at the end of the file."""
        self._stream.seek(start)
        return memoryview(self._stream.read(count))

    def arrow_file(self) -> pa.NativeFile:
        """The whole file, for Arrow; not copied where it is mapped."""
        return pa.PythonFile(self._stream, mode="r")

    def release(self, num_bytes: int) -> None:
        """About so many bytes of what was read were used and are not needed for now."""


class DamagedError(Exception):
    """The file ends inside what was asked for, or does not hold what it should."""


@dataclass(frozen=True, eq=False)
class NumberArray:
    """So many numbers that begin at a byte of an open file."""

    ranges: ByteRanges
    dtype: np.dtype
    at_bytes: int
    size: int

    @property
    def end_bytes(self) -> int:
        return self.at_bytes + self.size * self.dtype.itemsize

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Numbers `[start, stop)`, not copied where the file is mapped; a `DamagedError` where it ends before."""
        at, wanted = self.at_bytes + start * self.dtype.itemsize, (stop - start) * self.dtype.itemsize
        content = self.ranges.read(at, wanted)
        if len(content) != wanted:
            raise DamagedError(f"it ends at byte {at + len(content)}")
        return np.frombuffer(content, dtype=self.dtype)


@contextmanager
def open_ranges(file: SourceFile) -> Iterator[ByteRanges]:
    """The bytes of a file that is not compressed; raises as `SourceFile.open`."""
    with file.open() as stream:
        if file.is_local:
            try:
                yield _MappedRanges(stream)
            except OSError as err:
                raise unreadable(file, err) from err
        else:
            yield ByteRanges(stream, file.size_bytes)


class _MappedRanges(ByteRanges):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream, stream.seek(0, 2))
        # An empty file cannot be mapped. The map is closed by its last array.
        self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if self.size_bytes else None
        self._view = memoryview(self._map or b"")
        self._used_bytes = 0

    def read(self, start: int, count: int) -> memoryview:
        return self._view[start : start + count]

    def arrow_file(self) -> pa.NativeFile:
        return pa.BufferReader(pa.py_buffer(self._view))

    def release(self, num_bytes: int) -> None:
        self._used_bytes += max(num_bytes, _MAPPED_AT_ONCE_BYTES)
        if self._map is not None and self._used_bytes > _RELEASE_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._used_bytes = 0
