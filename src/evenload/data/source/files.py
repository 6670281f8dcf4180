"""`SourceFile`: one file of a source, its format, and its bytes.

A file is known by its path below the source and its size, not by where the source stands, so a data set may move
between save and resume. What reading it may raise means damaged content (a problem of a record) or failing storage (an
error).
"""

import hashlib
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, Literal, TypeVar

from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem

from evenload.errors import DataError, EvenloadError

FileFormat = Literal["text", "jsonl", "json", "parquet", "arrow", "memmap", "dataset"]
"""`DataConfig.format` resolved; "dataset" = no file but a Hugging Face data set handed over in Python."""

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Waits before every new attempt to read from remote storage; then it has failed."""

T = TypeVar("T")
_BUFFER_BYTES = 1 << 18
# Trying again cannot help these; in Python both are kinds of OSError.
_FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)
_DECOMPRESSORS: dict[Any, Any] = compr


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source.

    Args:
        name: how messages call it: the source as given, and the path below it.
        path: in the terms of `filesystem`; "" of a data set.
        key: source index and path below the source: what stays equal when the data set moves.
        size_bytes: None where the file system does not say.
        compression: fsspec's name of it; None = plain.
    """

    name: str
    path: str
    key: str
    size_bytes: int | None
    format: FileFormat
    compression: str | None
    filesystem: AbstractFileSystem

    @property
    def is_local(self) -> bool:
        """Whether `path` is one of this machine, so that the file can be mapped into memory."""
        return isinstance(self.filesystem, LocalFileSystem)

    def beside(self, suffix: str, other_suffix: str) -> "SourceFile | None":
        """The file of the same name with another suffix, such as a token file's index; None = there is none.

        Raises:
            DataError: the storage does not answer.
        """
        path = self.path.removesuffix(suffix) + other_suffix
        name = self.name.removesuffix(suffix) + other_suffix

        def find() -> SourceFile | None:
            try:
                size_bytes = self.filesystem.info(path).get("size")
            except FileNotFoundError:
                return None
            return replace(self, name=name, path=path, size_bytes=size_bytes)

        return _with_retries(find, name, lambda: f"{name} cannot be looked up")

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The decompressed bytes, seekable. Remote files are read on after a failure, see `_RemoteStream`.

        Raises:
            DataError: the file cannot be opened; when read: a remote file failed for good. Damaged compression raises
                what its library has for it (`damaged_compression`).
        """
        with self._open_raw() as raw:
            if self.compression is None:
                yield raw
            else:
                stream = _DECOMPRESSORS[self.compression](raw, mode="rb")
                with io.BufferedReader(stream, _BUFFER_BYTES) as buffered:
                    yield buffered

    def _open_raw(self) -> IO[bytes]:
        if not self.is_local:
            return io.BufferedReader(_RemoteStream(self), _BUFFER_BYTES)
        try:
            return open(self.path, "rb")
        except OSError as err:
            raise DataError(f"{self.name} cannot be opened: {err}; check the path and its permissions") from err


class _RemoteStream(io.RawIOBase):
    """Bytes of a file of any fsspec file system, opened when first read.

    Not all of fsspec's file systems try again (HTTP does not), and a read that ends too early looks like the end of the
    data. So a read that failed, or ended before the file does, opens the file again at the same byte; every byte that
    arrives starts the count of attempts anew.

    Raises:
        DataError: when read: the file cannot be opened, or failed for good; names file and byte.
    """

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._stream: Any = None
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._file.size_bytes is None:
            raise DataError(f"{self._file.name}: its storage does not say how large it is; copy the file first")
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes or 0}[whence]
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view, name = memoryview(buffer).cast("B"), self._file.name
        data = _with_retries(
            lambda: self._read(len(view)), name, lambda: f"{name} cannot be read at byte {self._position}", self._close
        )
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._close()
        super().close()

    def _read(self, count: int) -> bytes:
        left = None if self._file.size_bytes is None else max(0, self._file.size_bytes - self._position)
        if left == 0:
            return b""
        if self._stream is None:
            # The default of HTTP puts bytes at the wrong place where a server sends too few.
            settings = {"cache_type": "readahead"} if "http" in self._file.filesystem.protocol else {}
            self._stream = self._file.filesystem.open(self._file.path, "rb", **settings)
        if self._stream.tell() != self._position:
            self._stream.seek(self._position)
        data = self._stream.read(count if left is None else min(count, left))
        if not data and left:
            raise EOFError(f"it ends there, {left} bytes too early")
        return data

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def _with_retries(
    call: Callable[[], T], name: str, describe: Callable[[], str], clean_up: Callable[[], object] = lambda: None
) -> T:
    """What the call returns, after as many attempts as `RETRY_WAITS_S` allows; else a `DataError`.

    Args:
        name: of the file.
        describe: what failed, called after the last attempt; `clean_up` is called after every one.
    """
    waits_s = iter(RETRY_WAITS_S)
    while True:
        try:
            return call()
        except _FINAL_ERRORS as err:
            raise DataError(f"{name} cannot be opened: {err}; check the path and its permissions") from err
        except Exception as err:  # every file system raises classes of its own client library
            clean_up()
            if (wait_s := next(waits_s, None)) is None:
                raise DataError(
                    f"{describe()}: {err or type(err).__name__}; tried {1 + len(RETRY_WAITS_S)} times. Check the "
                    "storage it lies on; the run can be resumed"
                ) from err
            time.sleep(wait_s)


def damaged_compression(file: SourceFile, err: Exception) -> str:
    """The problem of a file whose reading raised this.

    Decompressors raise classes of their own, some of them kinds of OSError.

    Raises:
        DataError: it was not the compression but the storage that failed.
    """
    if isinstance(err, OSError) and (file.compression is None or is_storage_failure(err)):
        raise unreadable(file, err) from err
    if file.compression is None or isinstance(err, EvenloadError):
        raise err
    return f"its {file.compression} compression is damaged: {err}"


def unreadable(file: SourceFile, err: OSError) -> DataError:
    return DataError(f"{file.name} cannot be read: {err}; check the storage it lies on")


def is_storage_failure(err: OSError) -> bool:
    """Whether the operating system failed; libraries raise OSError without a number where bytes are damaged."""
    return err.errno is not None


def files_digest(files: Sequence[SourceFile]) -> str:
    """Number of files, bytes, and a hash of their relative paths and sizes, to notice that they changed."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.key}\0{file.size_bytes}\0".encode(errors="surrogateescape"))
    total_bytes = sum(file.size_bytes or 0 for file in files)
    return f"{len(files)} files of {total_bytes} bytes, {digest.hexdigest()[:16]}"
