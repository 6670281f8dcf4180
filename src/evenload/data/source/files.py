"""`SourceFile`: one file of a source, its format, and its bytes.

A file is known by its path below the source and its size, not by where the source stands, so a data set may move
between save and resume. What reading it may raise means damaged content (a problem of a record) or failing storage (an
error).
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, Literal

from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.implementations.local import LocalFileSystem

from evenload.data.source.remote import RemoteStream, call_with_retries
from evenload.errors import DataError, EvenloadError

FileFormat = Literal["text", "jsonl", "json", "parquet", "arrow", "memmap", "dataset"]
"""`DataConfig.format` resolved; "dataset" = no file but a Hugging Face data set handed over in Python."""

_BUFFER_BYTES = 1 << 18
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

        return call_with_retries(find, name, lambda: f"{name} cannot be looked up")

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The decompressed bytes, seekable. Remote files are read on after a failure, see `RemoteStream`.

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
            remote = RemoteStream(self.filesystem, self.path, self.name, self.size_bytes)
            return io.BufferedReader(remote, _BUFFER_BYTES)
        try:
            return open(self.path, "rb")
        except OSError as err:
            raise DataError(f"{self.name} cannot be opened: {err}; check the path and its permissions") from err


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
