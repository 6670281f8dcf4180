"""`SharedTensors`: named tensors of one process in files that other processes of the machine map, and that outlive it.

A tensor is a file of `/dev/shm` (`shared_directory`), mapped by its maker and by whoever wants to read it: no copy, no
pickle, no process that serves it. Its pages are taken when it is made (`posix_fallocate`), because a page that is
lacking later is no error of Python's but a bus error that ends the process.

A file has its name when it is complete, and names say type and size, so that there is no list that could differ from
the files. A file that is removed stays with those that have it mapped.

Price: pages are zeroed once, when they are taken; a few file operations a tensor.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from evenload.errors import ConfigError
from evenload.types.scaled_units import format_bytes

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16)}
_PARTIAL = ".partial"


class SharedTensors:
    """Of one process, in a folder of its own.

    Args:
        directory: made where it is not there; what another process left in it stays, until it is made anew or removed.
        purpose: what errors call it, such as "train.survivor_memory".
    """

    def __init__(self, directory: Path, purpose: str) -> None:
        self.directory, self._purpose = directory, purpose
        directory.mkdir(parents=True, exist_ok=True)

    def make(self, name: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros, [num_elements], in place of that of this name.

        Args:
            name: without "/".

        Raises:
            ConfigError: there is no room for it.
        """
        self.drop(name)
        if not num_elements:
            return torch.empty(0, dtype=dtype)
        path = self.directory / f"{name}.{num_elements}.{str(dtype).removeprefix('torch.')}"
        partial = path.with_name(path.name + _PARTIAL)
        try:
            with partial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_elements * dtype.itemsize)
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC:
                raise
            raise _no_room(self.directory, num_elements * dtype.itemsize, self._purpose) from error
        partial.rename(path)
        return _mapped(path)

    def drop(self, name: str) -> None:
        """Remove a tensor, where there is one; its pages go when nobody has it mapped any more."""
        for path in _files(self.directory, name):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """All of them, and the folder."""
        shutil.rmtree(self.directory, ignore_errors=True)


def shared_tensor(directory: Path, name: str) -> Tensor | None:
    """That which another process made there, [num_elements]; None = there is none. Writing to it writes to its file."""
    found = _files(directory, name)
    return _mapped(found[0]) if found else None


def require_room(directory: Path, num_bytes: int, purpose: str) -> None:
    """`ConfigError` where so many bytes are not free in the file system of a folder."""
    if num_bytes > shutil.disk_usage(directory).free:
        raise _no_room(directory, num_bytes, purpose)


def _no_room(directory: Path, num_bytes: int, purpose: str) -> ConfigError:
    usage = shutil.disk_usage(directory)
    return ConfigError(
        f"{purpose} needs {format_bytes(num_bytes)} of shared memory in {directory}, where {format_bytes(usage.free)} "
        f"of {format_bytes(usage.total)} are free; give the machine or the container more (mount -o remount,size=..., "
        "docker --shm-size), or leave that setting out"
    )


def _complete(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if path.is_file() and path.suffix.removeprefix(".") in _DTYPES)


def _files(directory: Path, name: str) -> list[Path]:
    return [path for path in _complete(directory) if path.name.rsplit(".", 2)[0] == name]


def _mapped(path: Path) -> Tensor:
    _, num_elements, dtype = path.name.rsplit(".", 2)
    return torch.from_file(str(path), shared=True, size=int(num_elements), dtype=_DTYPES[dtype])
