"""`SparseMemory`: memory of one process that others of the machine read, taken page by page where it is touched.

It is a file without a name (Linux's `memfd_create`), mapped by its process. Addresses are plenty and pages come with
the first touch, so that whatever may ever lie there has a place of its own from the start; `release` gives pages back
and keeps the place. Another process opens it once, through `/proc/PID/fd`, and reads from it straight into its own
memory (`preadv`): one copy, no page of the other's is mapped, and what a system's monitor shows of a process stays its
own.

Nothing is left behind: there is no name to remove, and the kernel frees the pages when the last process that has it
open has ended, however it ended. Until then what a dead process held can be read. The size of `/dev/shm` (64 MB in a
container by default) does not matter; the pages count as the machine's, and as the container's, like any others.
"""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

PAGE_BYTES = mmap.PAGESIZE
_RELEASED_AT_ONCE = 2**22
"""Bytes: releasing keeps Python's lock, and other threads train meanwhile."""


class SparseMemory:
    """Of this process.

    Args:
        num_bytes: of places, not of memory.

    Raises:
        OSError: the system has no such memory, or not so many addresses.
    """

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        self._descriptor = os.memfd_create("evenload")
        os.ftruncate(self._descriptor, num_bytes)
        self._map = mmap.mmap(self._descriptor, num_bytes)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)  # the pages stay as long as tensors, or other processes, have them

    @property
    def address(self) -> tuple[int, int, int]:
        """By which other processes of the machine find it: process, descriptor, and the file's number as a proof."""
        return os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino

    def tensor(self, offset: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A place as a flat tensor, [num_elements]; takes no memory before it is touched."""
        return torch.frombuffer(self._map, dtype=dtype, count=num_elements, offset=offset)

    def release(self, start: int, stop: int) -> None:
        """Give back the pages that lie wholly in these bytes, which are zeros afterwards."""
        start, stop = -(-start // PAGE_BYTES) * PAGE_BYTES, stop // PAGE_BYTES * PAGE_BYTES
        for first in range(start, stop, _RELEASED_AT_ONCE):
            self._map.madvise(mmap.MADV_REMOVE, first, min(_RELEASED_AT_ONCE, stop - first))


class OthersMemory:
    """The `SparseMemory` of another process of this machine, to read.

    Args:
        address: as the other process tells it.

    Raises:
        OSError: this process may not see it, or it is another process's (of another container, say).
    """

    def __init__(self, address: tuple[int, int, int]) -> None:
        process, descriptor, number = address
        self._descriptor = os.open(Path("/proc", str(process), "fd", str(descriptor)), os.O_RDONLY)
        if os.fstat(self._descriptor).st_ino != number:
            raise OSError(f"process {process} here is not the one that told its number")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, offset: int, into: Tensor) -> None:
        """Copy what lies there into a contiguous tensor on the CPU. Other threads run meanwhile."""
        left = into.detach().view(torch.uint8).numpy().data
        while len(left):
            count = os.preadv(self._descriptor, [left], offset)
            if not count:
                raise OSError(f"the memory of another process ends at byte {offset}")
            left, offset = left[count:], offset + count


def touch(tensor: Tensor) -> None:
    """Take the memory of a contiguous tensor on the CPU, so that writing to it later meets no page faults; its values
    are lost. Other threads run meanwhile."""
    if tensor.numel():
        flat = tensor.view(torch.uint8)
        flat[::PAGE_BYTES].zero_()
        flat[-1:].zero_()  # a page that begins behind the last step
