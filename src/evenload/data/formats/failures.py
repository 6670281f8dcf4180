"""What failing to read a file means: damaged content (a problem of a record) or failing storage (an error)."""

from evenload.data.files import SourceFile
from evenload.errors import DataError


def damaged_compression(file: SourceFile, err: Exception) -> str:
    """The problem of a file whose decompressor failed."""
    return f"its {file.compression} compression is damaged: {err}"


def unreadable(file: SourceFile, err: OSError) -> DataError:
    """The error of a file whose storage failed."""
    return DataError(f"{file.name} cannot be read: {err}; check the storage it lies on")


def is_storage_failure(err: OSError) -> bool:
    """Whether the operating system failed; Arrow raises OSError without a number where bytes are damaged."""
    return err.errno is not None
