"""`file_beside`: the index that lies beside a token file."""

import dataclasses

from evenload.data.source.files import SourceFile
from evenload.data.source.remote import call_with_retries
from evenload.errors import DataError


def file_beside(file: SourceFile, suffix: str, other_suffix: str) -> SourceFile | None:
    """The file of the same name with another suffix; None = there is none.

    Raises:
        DataError: the storage does not answer.
    """
    path = file.path.removesuffix(suffix) + other_suffix
    name = file.name.removesuffix(suffix) + other_suffix

    def find() -> SourceFile | None:
        try:
            size_bytes = file.filesystem.info(path).get("size")
        except FileNotFoundError:
            return None
        return dataclasses.replace(file, name=name, path=path, size_bytes=size_bytes)

    if not file.is_local:
        return call_with_retries(find, name, lambda: f"{name} cannot be looked up")
    try:
        return find()
    except OSError as err:
        raise DataError(f"{name} cannot be looked up: {err}; check its permissions") from err
