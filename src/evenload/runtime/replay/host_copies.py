"""Asynchronous copies of offloaded tensors to host memory and back, while the device computes.

`CudaHostCopies` runs them on a stream of its own, in page-locked memory, without stopping the host. A copy out waits
for the kernels that write the tensor; whoever uses a tensor that came back makes its stream wait for the copy. A copy
holds its device tensor until the computing stream has been ordered behind it, and only then is the memory free for what
is computed next: the allocator reuses it at once, in stream order. `ThreadHostCopies` is the same on a device without
streams: one thread copies, in order, so that plans with offloading run, and are tested, everywhere.

**The arena** (`HostArena`) has host memory in segments that are taken once and handed out again and again. Rows are
freed as soon as the last copy that reads them has been *queued*: the stream, or the thread, is the only one to touch
host memory, in order, so whatever is copied next to the same place is written after the last read. A tensor gets the
smallest hole that holds it; where none does, it is cut between rows over the largest holes, and only what these have no
room for makes the arena grow, by whole segments. So beyond the most that tensors ever took at once it holds little:

    held_bytes < peak_live_bytes + segment_bytes + holes * max(smallest_piece_bytes, bytes of a row)

Price: 35 µs a tensor in Python, most of it for views; holes are found by bisection.

**Page-locked memory** (`PageLockedMemory`) is memory of this process that `cudaHostRegister` page-locks; torch's own
(`pin_memory=True`) rounds every tensor up to a power of two. `Tensor.copy_(non_blocking=True)` is asynchronous for
page-locked memory of any origin. Forked children do not inherit it: a page that a fork shares is copied at the next
write, and a device would go on writing to the old one.
"""

import mmap
import resource
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenload.errors import ConfigError
from evenload.types.text import format_bytes

ALIGNMENT_BYTES = 512
"""Of a piece's first byte in its segment; more than any type or a cache line asks for."""
SEGMENT_BYTES = 256 * 2**20
"""Eight ranks of a node waste less than 2 GiB in their last segments, and 200 GiB are 800 calls to page-lock memory."""
SMALLEST_PIECE_BYTES = 2**20
"""Cut smaller, a copy over PCIe takes less time than asking for it."""


class PageLockedMemory:
    """Segments of page-locked memory until it is closed."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda.cudart()
        self._segments: list[Tensor] = []

    def new_segment(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes]; `ConfigError` where CUDA did not page-lock it."""
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        segment = torch.frombuffer(pages, dtype=torch.uint8)
        code = int(self._cuda.cudaHostRegister(segment.data_ptr(), num_bytes, 0))
        if code:
            raise ConfigError(self._refusal(num_bytes, code))
        self._segments.append(segment)
        return segment

    def close(self) -> None:
        while self._segments:
            code = int(self._cuda.cudaHostUnregister(self._segments.pop().data_ptr()))
            assert not code, f"cudaHostUnregister: CUDA error {code}"

    def _refusal(self, num_bytes: int, code: int) -> str:
        held = sum(segment.nbytes for segment in self._segments)
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        return (
            f"CUDA did not page-lock {format_bytes(num_bytes)} more host memory for offloaded activations; this "
            f"process has {format_bytes(held)} (cudaHostRegister: CUDA error {code}; ulimit -l: {allowed}). Lower "
            "plan.host_memory_bytes to what the machine has free, raise ulimit -l, or set plan.options.policy = "
            '"recompute"'
        )


class _Span(NamedTuple):
    """Bytes of a segment; sorts by size."""

    num_bytes: int
    segment: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.num_bytes


@dataclass(frozen=True, eq=False)
class HostRows:
    """A tensor [n, ...] in the arena: pieces [n_i, ...] of its rows in order, one where it lies in one place."""

    pieces: tuple[Tensor, ...]
    spans: tuple[_Span, ...]

    def rows(self, wanted: slice) -> list[Tensor]:
        """Some of its rows, piece by piece; one piece without rows where none are wanted."""
        found, first = [], 0
        for piece in self.pieces:
            start, stop = max(wanted.start - first, 0), min(wanted.stop - first, piece.shape[0])
            first += piece.shape[0]
            if start < stop:
                found.append(piece if stop - start == piece.shape[0] else piece[start:stop])
        return found or [self.pieces[0][:0]]


class HostArena:
    """Takes and frees tensors in segments of host memory (uint8, a multiple of `segment_bytes`); tensors may be cut
    into pieces of `smallest_piece_bytes`."""

    def __init__(
        self,
        new_segment: Callable[[int], Tensor],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        smallest_piece_bytes: int = SMALLEST_PIECE_BYTES,
    ) -> None:
        assert segment_bytes % ALIGNMENT_BYTES == 0
        self._new_segment = new_segment
        self._segment_bytes, self._smallest_piece_bytes = segment_bytes, smallest_piece_bytes
        self._segments: list[Tensor] = []
        self._holes: list[_Span] = []
        """By size."""
        self._starting: dict[tuple[int, int], _Span] = {}
        self._ending: dict[tuple[int, int], _Span] = {}
        """Holes by where they start and end."""
        self._live: set[_Span] = set()
        self.held_bytes = 0
        self.live_bytes = 0
        self.peak_live_bytes = 0

    @property
    def num_holes(self) -> int:
        return len(self._holes)

    def take(self, shape: torch.Size, dtype: torch.dtype) -> HostRows:
        """Memory for a tensor [n, ...], whatever it held; where `new_segment` raises nothing is taken."""
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
        """What is taken from now on may lie where these rows lie."""
        for span in rows.spans:
            self._live.remove(span)
            self.live_bytes -= span.num_bytes
            self._add_hole(span)

    def free_all(self) -> None:
        self.free(HostRows((), tuple(self._live)))

    def _hole_for(self, num_rows: int, row_bytes: int) -> tuple[_Span | None, int]:
        """Where the next piece of so many rows goes, and how many of them; None where that is not worth it."""
        at = bisect_left(self._holes, (_aligned(num_rows * row_bytes),))
        if at < len(self._holes):
            return self._holes[at], num_rows
        if not self._holes:
            return None, 0
        largest = self._holes[-1]
        fitting = largest.num_bytes // row_bytes
        is_worth_it = fitting and fitting * row_bytes >= self._smallest_piece_bytes
        return (largest, fitting) if is_worth_it else (None, 0)

    def _grow(self, missing_bytes: int) -> None:
        num_bytes = -(-missing_bytes // self._segment_bytes) * self._segment_bytes
        self._segments.append(self._new_segment(num_bytes))
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


class Copy(NamedTuple):
    """A copy under way: `wait` orders what is computed from now on behind it, `release` makes sure that its source,
    which is needed no more, may be reused by what is computed from now on."""

    wait: Callable[[], object]
    release: Callable[[], object]


class HostCopies(ABC):
    """Copies of tensors to host memory and back; see the module."""

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
        self.arena.free(host)

    def begin_step(self) -> None:
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
    """On a side stream and in page-locked memory."""

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
