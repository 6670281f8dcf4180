"""`RemoteStream`: a remote file read on, from the byte where it stands, after its storage failed.

Connections are cut, servers answer with too few bytes, time-outs happen; in a run of weeks all of them do. fsspec tries
again in some of its file systems and for some errors (not over HTTP, and never after too few bytes). Here a failed read
closes the file, waits, opens it again at the same byte and reads on, so nothing above (decompression, parquet) notices.
A read that ends before the file does counts as failed: it would otherwise look like the end of the data. Attempts are
bounded; every byte that arrives starts the count anew.

Price: one comparison a read. What fsspec reads ahead (5 MB with most file systems) is read again after a failure.
"""

import io
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec import AbstractFileSystem

from evenload.errors import DataError

RETRY_WAITS_S = (0.1, 0.5, 2.0)
"""Waits before every new attempt; then the source has failed."""

T = TypeVar("T")
_SKIP_BYTES = 1 << 20
# Trying again cannot help these; in Python both are kinds of OSError.
_FINAL_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)


def call_with_retries(
    call: Callable[[], T], name: str, say_failure: Callable[[], str], clean_up: Callable[[], object] = lambda: None
) -> T:
    """What the call returns, after as many attempts as `RETRY_WAITS_S` allows.

    Args:
        name: of the file.
        say_failure: what failed, asked for at the end.
        clean_up: called after every failure.

    Raises:
        DataError: every attempt failed, or the file is not there.
    """
    waits_s = iter(RETRY_WAITS_S)
    while True:
        try:
            return call()
        except _FINAL_ERRORS as err:
            raise DataError(f"{name} cannot be opened: {err}; check the path and its permissions") from err
        except Exception as err:  # every file system raises classes of its own client library
            clean_up()
            wait_s = next(waits_s, None)
            if wait_s is None:
                raise DataError(
                    f"{say_failure()}: {err or type(err).__name__}; tried {1 + len(RETRY_WAITS_S)} times. Check the "
                    "storage it lies on; the run can be resumed"
                ) from err
            time.sleep(wait_s)


class RemoteStream(io.RawIOBase):
    """Bytes of a file of any fsspec file system; seekable, if need be by reading. Opened when first read.

    Args:
        name: how messages call the file.
        size_bytes: None where the file system does not say.

    Raises:
        DataError: when read: the file cannot be opened, or failed for good; names file and byte.
    """

    def __init__(self, filesystem: AbstractFileSystem, path: str, name: str, size_bytes: int | None) -> None:
        self._filesystem, self._path, self._name, self._size_bytes = filesystem, path, name, size_bytes
        self._stream: Any = None
        self._front_to_back = False
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            if self._size_bytes is None:
                raise DataError(f"{self._name}: its storage does not say how large it is; copy the file first")
            offset += self._size_bytes
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        return call_with_retries(
            lambda: self._read_some(view),
            self._name,
            lambda: f"{self._name} cannot be read at byte {self._position}",
            self._close_stream,
        )

    def close(self) -> None:
        self._close_stream()
        super().close()

    def _read_some(self, view: memoryview) -> int:
        size_bytes = self._size_bytes
        if size_bytes is not None and self._position >= size_bytes:
            return 0
        wanted = len(view) if size_bytes is None else min(len(view), size_bytes - self._position)
        try:
            data = self._aligned().read(wanted)
        except ValueError:
            # What fsspec raises where a web server cannot begin inside a file.
            if self._front_to_back or not self._position or "http" not in self._filesystem.protocol:
                raise
            self._close_stream()
            self._front_to_back = True
            return self._read_some(view)
        if not data and size_bytes is not None:
            raise EOFError(f"it ends there, {size_bytes - self._position} bytes too early")
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _aligned(self) -> Any:
        """The file below, at our position; where it cannot seek, by reading."""
        stream = self._stream or self._open_stream()
        at = stream.tell()
        if at == self._position:
            return stream
        try:
            stream.seek(self._position)
            return stream
        except (ValueError, NotImplementedError, io.UnsupportedOperation):
            if at > self._position:
                self._close_stream()
                stream = self._open_stream()
        while (missing := self._position - stream.tell()) > 0:
            if not stream.read(min(missing, _SKIP_BYTES)):
                raise EOFError(f"it ends {missing} bytes before")
        return stream

    def _open_stream(self) -> Any:
        # A block of no bytes is how fsspec calls a plain stream.
        settings: dict[str, Any] = {"block_size": 0} if self._front_to_back else {}
        self._stream = self._filesystem.open(self._path, "rb", **settings)
        return self._stream

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
