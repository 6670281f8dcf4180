"""Asynchronous copies of offloaded tensors to host memory and back, beside the computation.

`CudaHostCopies` runs them on a stream of its own, in page-locked memory, without stopping the host. A copy out waits
for the kernels that write the tensor; whoever uses a tensor that came back makes its stream wait for the copy. All
device memory is the computing stream's. A copy holds its tensor until that stream has been ordered behind it, and only
then is the memory free for what is computed next: the allocator reuses it at once, in stream order, however far the
host is ahead. (`Tensor.record_stream` would let it go before, and the allocator take new memory until the copy has
run.)

`ThreadHostCopies` is the same on a device without streams: one thread copies, in order. On a CPU this saves nothing,
since device and host are one memory; it is there so that plans with offloading run, and are tested, everywhere.

Host memory comes from an arena (`host_arena.py`) and is freed by hand, as soon as the last copy that reads it has been
*asked for*. That is early enough to be wrong anywhere else, and right here: the stream, or the thread, is the only one
to touch host memory, and does what it was asked for in order. So whatever is copied next to the same place is written
after the last read. Nothing else may read or write it, not even the host.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenload.runtime.replay.host_arena import HostArena, HostRows
from evenload.runtime.replay.page_locked import PageLockedMemory

Moves = Sequence[tuple[Tensor, Tensor]]
"""(into, from) of equal shapes."""


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

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena

    def to_host(self, tensor: Tensor) -> tuple[HostRows, Copy]:
        """Rows in host memory and the copy that fills them. `tensor` [n, ...] must not be changed."""
        host = self.arena.take(tensor.shape, tensor.dtype)
        sizes = [piece.shape[0] for piece in host.pieces]
        return host, self._copy(tuple(zip(host.pieces, tensor.split(sizes), strict=True)), device_side=tensor)

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        """A device tensor of rows in host memory, one piece after the other, and the copy that fills it."""
        sizes = [piece.shape[0] for piece in pieces]
        buffer = torch.empty(sum(sizes), *pieces[0].shape[1:], dtype=pieces[0].dtype, device=device)
        return buffer, self._copy(tuple(zip(buffer.split(sizes), pieces, strict=True)), device_side=buffer)

    def free(self, host: HostRows) -> None:
        """No copy that reads these rows will be asked for any more."""
        self.arena.free(host)

    def begin_step(self) -> None:
        """What a step left that did not come to its end is nobody's."""
        self.arena.free_all()

    @abstractmethod
    def _copy(self, moves: Moves, device_side: Tensor) -> Copy: ...


class ThreadHostCopies(HostCopies):
    """One thread; a copy starts when the one before has ended."""

    def __init__(self, arena: HostArena | None = None) -> None:
        super().__init__(arena or HostArena(_plain_memory))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evenload-offload")

    def _copy(self, moves: Moves, device_side: Tensor) -> Copy:
        done = self._thread.submit(_copy_rows, moves)
        return Copy(done.result, done.result)


class CudaHostCopies(HostCopies):
    """On a side stream and in page-locked memory. Not run on hardware yet; tests/runtime/test_copy_streams.py runs its
    order of streams and events on the least favourable devices."""

    def __init__(self, device: torch.device, arena: HostArena | None = None) -> None:
        self._stream = torch.cuda.Stream(device)
        memory = PageLockedMemory()
        super().__init__(arena or HostArena(memory.new_segment))
        # Not at the end of the process: the system does it there, and a stream may wait for a rank that is lost.
        weakref.finalize(self, _close, self._stream, memory).atexit = False  # type: ignore[attr-defined]

    def _copy(self, moves: Moves, device_side: Tensor) -> Copy:
        device = device_side.device
        # A tensor may still be written, and a new buffer's memory read, by kernels queued before.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy_rows(moves)
        done = torch.cuda.Event()
        done.record(self._stream)
        held = [device_side]

        def order_behind() -> None:
            torch.cuda.current_stream(device).wait_event(done)
            held.clear()

        return Copy(order_behind, order_behind)


def host_copies(device: torch.device) -> HostCopies:
    return CudaHostCopies(device) if device.type == "cuda" else ThreadHostCopies()


def _copy_rows(moves: Moves) -> None:
    for into, rows in moves:
        into.copy_(rows, non_blocking=True)


def _plain_memory(num_bytes: int) -> Tensor:
    # numpy's: the system gives pages when they are first written, and torch's would be filled in deterministic runs.
    return torch.from_numpy(np.empty(num_bytes, np.uint8))


def _close(stream: torch.cuda.Stream, memory: PageLockedMemory) -> None:
    stream.synchronize()
    memory.close()
