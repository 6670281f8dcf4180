"""Asynchronous copies of offloaded tensors to host memory and back, beside the computation.

`CudaHostCopies` runs them on a stream of its own, in pinned memory, without stopping the host. A copy out waits for
the kernels that write the tensor; whoever uses a tensor that came back makes its stream wait for the copy. A device
buffer is allocated on the computing stream and handed to the copying one by an event, so the allocator's rule of
"reuse in stream order" bounds memory without any wait of the host.

`ThreadHostCopies` is the same on a device without streams: one thread copies, in order, into memory of its own.
On a CPU this saves nothing, since device and host are one memory; it is there so that plans with offloading run, and
are tested, everywhere.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Order what is computed from now on behind the copy."""
        ...

    def release(self) -> None:
        """Its source is needed no more: make sure that it may be reused."""
        ...


class HostCopies(Protocol):
    """Copies of one device."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        """A host tensor and the copy that fills it. `tensor` must not be changed."""
        ...

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        """A device tensor of the rows of host tensors, one after the other, and the copy that fills it."""
        ...


def host_copies(device: torch.device) -> HostCopies:
    """Those of a device."""
    return CudaHostCopies(device) if device.type == "cuda" else ThreadHostCopies()


class ThreadHostCopies:
    """One thread; a copy starts when the one before has ended."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evenload-offload")

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        """See `HostCopies`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return host, _ThreadCopy(self._thread.submit(_copy_rows, host, [tensor]))

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        """See `HostCopies`."""
        buffer = _empty_for(pieces, device)
        return buffer, _ThreadCopy(self._thread.submit(_copy_rows, buffer, pieces))


class _ThreadCopy:
    def __init__(self, done: Future) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()

    def release(self) -> None:
        self._done.result()


class CudaHostCopies:
    """A side stream and pinned memory. Not run by any test of this version: there was no GPU at hand."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        """See `HostCopies`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host, _CudaCopy(self._stream)

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        """See `HostCopies`."""
        buffer = _empty_for(pieces, device)
        # The buffer's memory may still be read by kernels queued before; its reuse is ordered behind them.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy_rows(buffer, pieces)
        buffer.record_stream(self._stream)
        return buffer, _CudaCopy(self._stream)


class _CudaCopy:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._done = torch.cuda.Event()
        self._done.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)

    def release(self) -> None:
        """`record_stream` keeps the source's memory from reuse until the copy has run."""


def _empty_for(pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    rows = sum(piece.shape[0] for piece in pieces)
    return torch.empty(rows, *pieces[0].shape[1:], dtype=pieces[0].dtype, device=device)


def _copy_rows(into: Tensor, pieces: Sequence[Tensor]) -> None:
    row = 0
    for piece in pieces:
        into[row : row + piece.shape[0]].copy_(piece, non_blocking=True)
        row += piece.shape[0]
