"""`DecompressedStream`: what a decompressor gives, with one error for bytes that it cannot decompress.

Every library raises classes of its own, some of them kinds of OSError, on damaged or truncated input; above, that has
to be told from storage that fails. Price: one call a buffer.
"""

import io
from typing import Any

from evenload.errors import EvenloadError


class BrokenCompressionError(Exception):
    """The compressed bytes are damaged or end too early."""


class DecompressedStream(io.RawIOBase):
    """Decompressed bytes; seeks by reading.

    Args:
        stream: file object of a decompression library.

    Raises:
        BrokenCompressionError: when read.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Decompressed bytes before the next one."""
        return self._stream.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a decompressed byte; reads what lies before it."""
        return self._guarded(self._stream.seek, offset, whence)

    def readinto(self, buffer: Any) -> int:
        """The next bytes, at most as many as fit; 0 = the end."""
        data = self._guarded(self._stream.read, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        """All that is left."""
        return self._guarded(self._stream.read)

    def close(self) -> None:
        """Close the decompressor, not the file below it."""
        self._stream.close()
        super().close()

    def _guarded(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except EvenloadError:
            raise
        except Exception as err:  # see the module's text
            if isinstance(err, OSError) and err.errno is not None:
                raise
            raise BrokenCompressionError(str(err)) from err
