"""Asynchronous copies of offloaded tensors to host memory and back, beside the computation.

`CudaHostCopies` runs them on a stream of its own, in pinned memory, without stopping the host. A copy out waits for
the kernels that write the tensor; whoever uses a tensor that came back makes its stream wait for the copy. All device
memory is the computing stream's. A copy holds its tensor until that stream has been ordered behind it, and only then is
the memory free for what is computed next: the allocator reuses it at once, in stream order, however far the host is
ahead. (`Tensor.record_stream` would let it go before, and the allocator take new memory until the copy has run.)

Pinned tensors come from torch's caching allocator, which rounds every one up to a power of two and keeps what is freed
for the next step: a process holds its peak to its end. `host_bytes` says what a tensor takes there.

`ThreadHostCopies` is the same on a device without streams: one thread copies, in order, into memory of its own.
On a CPU this saves nothing, since device and host are one memory; it is there so that plans with offloading run, and
are tested, everywhere.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor


class Copy(NamedTuple):
    """A copy under way.

    Args:
        wait: orders what is computed from now on behind the copy.
        release: its source is needed no more; makes sure that it may be reused by what is computed from now on.
    """

    wait: Callable[[], object]
    release: Callable[[], object]


class HostCopies(ABC):
    """What both devices have in common."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        """A host tensor and the copy that fills it. `tensor` must not be changed."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        return host, self._copy(host, [tensor], device_side=tensor)

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        """A device tensor of the rows of host tensors, one after the other, and the copy that fills it."""
        rows = sum(piece.shape[0] for piece in pieces)
        buffer = torch.empty(rows, *pieces[0].shape[1:], dtype=pieces[0].dtype, device=device)
        return buffer, self._copy(buffer, pieces, device_side=buffer)

    def host_bytes(self, tensor: Tensor) -> int:
        """What the host holds for a copy of a tensor."""
        return tensor.nbytes

    @abstractmethod
    def _copy(self, into: Tensor, pieces: Sequence[Tensor], device_side: Tensor) -> Copy: ...


class ThreadHostCopies(HostCopies):
    """One thread; a copy starts when the one before has ended."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evenload-offload")

    def _copy(self, into: Tensor, pieces: Sequence[Tensor], device_side: Tensor) -> Copy:
        done = self._thread.submit(_copy_rows, into, pieces)
        return Copy(done.result, done.result)


class CudaHostCopies(HostCopies):
    """On a side stream and in pinned memory. Not run on hardware yet; tests/runtime/test_copy_streams.py runs its order
    of streams and events on the least favourable devices."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def host_bytes(self, tensor: Tensor) -> int:
        return 1 << (tensor.nbytes - 1).bit_length() if tensor.nbytes else 0

    def _copy(self, into: Tensor, pieces: Sequence[Tensor], device_side: Tensor) -> Copy:
        device = device_side.device
        # A tensor may still be written, and a new buffer's memory read, by kernels queued before.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy_rows(into, pieces)
        done = torch.cuda.Event()
        done.record(self._stream)
        held = [device_side]

        def order_behind() -> None:
            torch.cuda.current_stream(device).wait_event(done)
            held.clear()

        return Copy(order_behind, order_behind)


def host_copies(device: torch.device) -> HostCopies:
    return CudaHostCopies(device) if device.type == "cuda" else ThreadHostCopies()


def _copy_rows(into: Tensor, pieces: Sequence[Tensor]) -> None:
    sizes = [piece.shape[0] for piece in pieces]
    for rows, piece in zip(into.split(sizes), pieces, strict=True):
        rows.copy_(piece, non_blocking=True)
