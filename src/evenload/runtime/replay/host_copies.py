"""Copy offloaded tensors to host memory and back while the device computes.

`CudaHostCopies` uses a stream of its own and page-locked memory, and the host never waits. A copy out waits for the
kernels that write the tensor; the reader of a fetched tensor makes its stream wait for the copy. A copy holds its
device tensor until the computing stream has been ordered behind it. `ThreadHostCopies` copies in one thread, in order.

`HostArena` takes host memory in segments and hands it out again and again. Rows are freed as soon as the last copy that
reads them is *queued*, because one stream, or thread, touches host memory in order. A tensor gets the smallest hole
that holds it; where none does, it is cut between rows over the largest holes, and the arena grows by whole segments for
what is left, so that it holds little more than tensors ever took at once:

    held_bytes < peak_live_bytes + segment_bytes + holes * max(smallest_piece_bytes, bytes of a row)
"""

import mmap
import resource
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenload.errors import ConfigError
from evenload.types.text import format_bytes

ALIGNMENT_BYTES = 512
"""Of a piece's first byte in its segment; more than any type or a cache line needs."""
SEGMENT_BYTES = 256 * 2**20
"""Eight ranks of a node waste less than 2 GiB in their last segments, and 200 GiB are 800 calls to page-lock memory."""
SMALLEST_PIECE_BYTES = 2**20
"""A smaller copy over PCIe takes less time than queueing it."""


PAGE_BYTES = mmap.PAGESIZE
_TOUCHING_THREADS = 8


def touch(tensor: Tensor) -> None:
    """Take the memory of a contiguous tensor on the CPU; its values are lost. Other threads run meanwhile."""
    if tensor.numel():
        flat = tensor.view(torch.uint8)
        flat[::PAGE_BYTES].zero_()
        flat[-1:].zero_()  # a page that begins behind the last step


def page_lock(memory: Tensor) -> int:
    """Page-lock memory that begins a page, whose values are lost; return CUDA's code. Threads take it first: CUDA does
    that page by page in one, at about a gigabyte a second."""
    share = -(-len(memory) // (_TOUCHING_THREADS * PAGE_BYTES)) * PAGE_BYTES
    with ThreadPoolExecutor(_TOUCHING_THREADS) as threads:
        list(threads.map(touch, memory.split(share)))
    cuda: Any = torch.cuda.cudart()
    return int(cuda.cudaHostRegister(memory.data_ptr(), len(memory), 0))


class PageLockedMemory:
    """Makes segments of page-locked memory; torch's `pin_memory=True` rounds every tensor up to a power of two."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda.cudart()
        self._segments: list[Tensor] = []

    def new_segment(self, num_bytes: int) -> Tensor:
        """Return uint8[num_bytes]; raise `ConfigError` where CUDA does not page-lock it."""
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The next write to a page that a fork shares copies it, and a device would go on writing to the old one.
        pages.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # of a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        segment = torch.frombuffer(pages, dtype=torch.uint8)
        if code := page_lock(segment):
            held = sum(other.nbytes for other in self._segments)
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            allowed = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
            raise ConfigError(
                f"CUDA did not page-lock {format_bytes(num_bytes)} more host memory for offloading; this process has "
                f"{format_bytes(held)} (cudaHostRegister: CUDA error {code}; ulimit -l: {allowed}). Lower "
                'plan.host_memory_bytes, raise ulimit -l, or set plan.options.policy = "recompute"'
            )
        self._segments.append(segment)
        return segment

    def close(self) -> None:
        while self._segments:
            code = int(self._cuda.cudaHostUnregister(self._segments.pop().data_ptr()))
            assert not code, f"cudaHostUnregister: CUDA error {code}"


class _Span(NamedTuple):
    """Names bytes of a segment; sorts by size."""

    num_bytes: int
    segment: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True, eq=False)
class HostRows:
    """Holds a tensor [n, ...] in the arena as pieces [n_i, ...] of its rows in order."""

    pieces: tuple[Tensor, ...]
    spans: tuple[_Span, ...]

    def rows(self, wanted: slice) -> list[Tensor]:
        """Return some of its rows, piece by piece; one piece without rows where none are wanted."""
        parts, first = [], 0
        for piece in self.pieces:
            start, stop = max(wanted.start - first, 0), min(wanted.stop - first, piece.shape[0])
            first += piece.shape[0]
            if start < stop:
                parts.append(piece if stop - start == piece.shape[0] else piece[start:stop])
        return parts or [self.pieces[0][:0]]


class HostArena:
    """Allocates tensors in segments of host memory (uint8), in pieces of at least `smallest_piece_bytes`."""

    def __init__(
        self,
        new_segment: Callable[[int], Tensor],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        smallest_piece_bytes: int = SMALLEST_PIECE_BYTES,
    ) -> None:
        assert segment_bytes % ALIGNMENT_BYTES == 0
        self.new_segment = new_segment
        self._segment_bytes, self._smallest_piece_bytes = segment_bytes, smallest_piece_bytes
        self._segments: list[Tensor] = []
        # Holes by size, and by where they start and end.
        self._holes: list[_Span] = []
        self._starting: dict[tuple[int, int], _Span] = {}
        self._ending: dict[tuple[int, int], _Span] = {}
        self._live: set[_Span] = set()
        self.held_bytes = self.live_bytes = self.peak_live_bytes = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> HostRows:
        """Allocate a tensor [n, ...] without values; nothing is taken where `new_segment` raises."""
        row_bytes = shape[1:].numel() * dtype.itemsize
        if not shape[0] * row_bytes:
            return HostRows((torch.empty(shape, dtype=dtype),), ())
        pieces: list[Tensor] = []
        spans: list[_Span] = []
        rows_left = shape[0]
        while rows_left:
            hole, num_rows = self._hole_for(rows_left, row_bytes)
            if hole is None:
                try:
                    self._grow(_aligned(rows_left * row_bytes))
                except BaseException:
                    self.free(HostRows((), tuple(spans)))
                    raise
                continue
            span = self._take_from(hole, _aligned(num_rows * row_bytes))
            memory = self._segments[span.segment][span.start : span.start + num_rows * row_bytes]
            pieces.append(memory.view(dtype).view(num_rows, *shape[1:]))
            spans.append(span)
            rows_left -= num_rows
        return HostRows(tuple(pieces), tuple(spans))

    def free(self, rows: HostRows) -> None:
        """Free rows; what is taken next may lie in their place."""
        for span in rows.spans:
            self._live.remove(span)
            self.live_bytes -= span.num_bytes
            self._add_hole(span)

    def free_all(self) -> None:
        self.free(HostRows((), tuple(self._live)))

    def _hole_for(self, num_rows: int, row_bytes: int) -> tuple[_Span | None, int]:
        """Return a hole for the next piece of so many rows, and how many fit; None = the arena must grow."""
        at = bisect_left(self._holes, (_aligned(num_rows * row_bytes),))
        if at < len(self._holes):
            return self._holes[at], num_rows
        if not self._holes:
            return None, 0
        largest = self._holes[-1]
        fitting = largest.num_bytes // row_bytes
        is_used = fitting and fitting * row_bytes >= self._smallest_piece_bytes
        return (largest, fitting) if is_used else (None, 0)

    def _grow(self, missing_bytes: int) -> None:
        num_bytes = -(-missing_bytes // self._segment_bytes) * self._segment_bytes
        self._segments.append(self.new_segment(num_bytes))
        self.held_bytes += num_bytes
        self._add_hole(_Span(num_bytes, len(self._segments) - 1, 0))

    def _take_from(self, hole: _Span, num_bytes: int) -> _Span:
        self._remove_hole(hole)
        span = _Span(num_bytes, hole.segment, hole.start)
        if hole.num_bytes > num_bytes:
            self._add_hole(_Span(hole.num_bytes - num_bytes, hole.segment, span.stop))
        self._live.add(span)
        self.live_bytes += num_bytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)
        return span

    def _add_hole(self, hole: _Span) -> None:
        before = self._ending.get((hole.segment, hole.start))
        after = self._starting.get((hole.segment, hole.stop))
        for other in (before, after):
            if other is not None:
                self._remove_hole(other)
                hole = _Span(hole.num_bytes + other.num_bytes, hole.segment, min(hole.start, other.start))
        insort(self._holes, hole)
        self._starting[hole.segment, hole.start] = self._ending[hole.segment, hole.stop] = hole

    def _remove_hole(self, hole: _Span) -> None:
        del self._holes[bisect_left(self._holes, hole)]
        del self._starting[hole.segment, hole.start], self._ending[hole.segment, hole.stop]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


Moves = Sequence[tuple[Tensor, Tensor]]
"""(into, from) of equal shapes."""
Wait = Callable[[], object]
"""Orders what is computed next behind a copy: it may read the target, and reuse the memory of a source that is needed
no more."""


class HostCopies(ABC):
    """Copies tensors to host memory and back; see the module."""

    def __init__(self, arena: HostArena) -> None:
        self.arena = arena

    def to_host(self, tensor: Tensor) -> tuple[HostRows, Wait]:
        """Start to copy `tensor` [n, ...], which must not be changed; return its rows in host memory."""
        host = self.arena.take(tensor.shape, tensor.dtype)
        sizes = [piece.shape[0] for piece in host.pieces]
        return host, self._copy(tuple(zip(host.pieces, tensor.split(sizes), strict=True)), device_side=tensor)

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Wait]:
        """Start to copy rows in host memory, one piece after the other; return the device tensor of them."""
        sizes = [piece.shape[0] for piece in pieces]
        buffer = torch.empty(sum(sizes), *pieces[0].shape[1:], dtype=pieces[0].dtype, device=device)
        return buffer, self._copy(tuple(zip(buffer.split(sizes), pieces, strict=True)), device_side=buffer)

    def to_rows(self, tensor: Tensor, rows: Tensor) -> Wait:
        """Start to copy `tensor` [n, ...], which must not be changed, over rows [n, ...] in host memory."""
        return self._copy(((rows, tensor),), device_side=tensor)

    def begin_step(self) -> None:
        self.arena.free_all()

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all copies are done."""

    @abstractmethod
    def _copy(self, moves: Moves, device_side: Tensor) -> Wait: ...


class ThreadHostCopies(HostCopies):
    """Copies in one thread, in order."""

    def __init__(self, arena: HostArena | None = None) -> None:
        super().__init__(arena or HostArena(_plain_memory))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evenload-offload")

    def synchronize(self) -> None:
        self._thread.submit(int).result()

    def _copy(self, moves: Moves, device_side: Tensor) -> Wait:
        return self._thread.submit(_copy_rows, moves).result


class CudaHostCopies(HostCopies):
    """Copies on a side stream, to and from page-locked memory."""

    def __init__(self, device: torch.device, arena: HostArena | None = None) -> None:
        self._stream = torch.cuda.Stream(device)
        memory = PageLockedMemory()
        super().__init__(arena or HostArena(memory.new_segment))
        # Not at the end of the process: the system does it there, and a stream may wait for a rank that is lost.
        weakref.finalize(self, _close, self._stream, memory).atexit = False  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _copy(self, moves: Moves, device_side: Tensor) -> Wait:
        device = device_side.device
        # A tensor may still be written, and a new buffer's memory read, by kernels queued before.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy_rows(moves)
        done = torch.cuda.Event()
        done.record(self._stream)
        held = [device_side]

        def wait() -> None:
            torch.cuda.current_stream(device).wait_event(done)
            held.clear()

        return wait


def host_copies(device: torch.device) -> HostCopies:
    return CudaHostCopies(device) if device.type == "cuda" else ThreadHostCopies()


def _copy_rows(moves: Moves) -> None:
    for into, rows in moves:
        into.copy_(rows, non_blocking=True)


def _plain_memory(num_bytes: int) -> Tensor:
    # numpy's memory gets pages when it is first written; torch's would be filled in deterministic runs.
    return torch.from_numpy(np.empty(num_bytes, np.uint8))


def _close(stream: torch.cuda.Stream, memory: PageLockedMemory) -> None:
    stream.synchronize()
    memory.close()
