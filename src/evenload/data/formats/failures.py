"""What failing to read a file means: damaged content (a problem of a record) or failing storage (an error)."""

from evenload.data.source.files import SourceFile
from evenload.errors import DataError, EvenloadError


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
    """The error of a file whose storage failed."""
    return DataError(f"{file.name} cannot be read: {err}; check the storage it lies on")


def is_storage_failure(err: OSError) -> bool:
    """Whether the operating system failed; libraries raise OSError without a number where bytes are damaged."""
    return err.errno is not None
