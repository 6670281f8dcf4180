"""`PageLockedMemory`: host memory that a GPU copies to and from by itself, without the host waiting.

It is plain memory of this process, page-locked by CUDA: `cudaHostRegister` makes a range what `cudaHostAlloc` gives.
torch's own pinned memory (`pin_memory=True`) rounds every tensor up to a power of two, 1 / ln 2 = 1.44 times over sizes
of every magnitude (`CachingHostAllocator.h`, `PowerOf2Ceil`; a limit of what is rounded came with 2.13).

`Tensor.copy_(non_blocking=True)` needs nothing else (ATen/native/cuda/Copy.cu, torch 2.11 to 2.13): it calls
`cudaMemcpyAsync`, which is asynchronous for page-locked memory of any origin, and then offers an event to the caching
host allocator. That ignores memory which is not its own (`record_event` finds no such block), so nobody waits for such
an event before the memory is written again: whoever hands it out orders that (`host_copies.py`). A copy lies within
one registered range, because a view lies within one segment.

Children that are forked do not inherit it: a page that a fork shares is copied at the next write, and a device would
go on writing to the old one.
"""

import mmap
import resource
from typing import Any

import torch
from torch import Tensor

from evenload.errors import ConfigError
from evenload.types.scaled_units import format_bytes


class PageLockedMemory:
    """Segments of page-locked memory until it is closed."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda.cudart()
        self._segments: list[Tensor] = []

    def new_segment(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes].

        Raises:
            ConfigError: CUDA did not page-lock it.
        """
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        segment = torch.frombuffer(pages, dtype=torch.uint8)
        code = int(self._cuda.cudaHostRegister(segment.data_ptr(), num_bytes, 0))
        if code:
            raise ConfigError(self._refusal(num_bytes, code))
        self._segments.append(segment)
        return segment

    def close(self) -> None:
        """Before its memory is given back to the system; no copy may be under way."""
        while self._segments:
            code = int(self._cuda.cudaHostUnregister(self._segments.pop().data_ptr()))
            assert not code, f"cudaHostUnregister: CUDA error {code}"

    def _refusal(self, num_bytes: int, code: int) -> str:
        held = sum(segment.nbytes for segment in self._segments)
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        return (
            f"CUDA did not page-lock {format_bytes(num_bytes)} more host memory for offloaded activations, beside the "
            f"{format_bytes(held)} of this process (cudaHostRegister: CUDA error {code}; ulimit -l: {allowed}). Lower "
            "plan.host_memory_bytes to what the machine has free, raise ulimit -l, or keep activations out of host "
            'memory (plan.options.policy = "recompute")'
        )
