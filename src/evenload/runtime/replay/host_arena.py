"""`HostArena`: host memory of offloaded tensors, in segments that are taken once and handed out again and again.

A tensor gets the smallest hole that holds it. Where none does, it is cut between rows over the largest holes, and only
what these have no room for makes the arena grow, by whole segments. So holes are no loss: beyond the most that tensors
ever took at once the arena holds less than a segment, and holes too small to be worth a copy of their own:

    held_bytes < peak_live_bytes + segment_bytes + holes * max(smallest_piece_bytes, bytes of a row)

with one hole at most behind every piece that lives and at the start of every segment. (In 32 steps of plans of
large models best fit without cuts held up to 50 % more than the peak, this 0.3 % at most.) Holes side by
side are one again when their tensors are freed. Segments are never given back: the next step needs them.

What is taken may have been freed just before, while copies that read it are still queued. The arena does not know of
copies: `host_copies.py` says why that is right.

Price: 35 µs a tensor in Python, most of it for views; holes are found by bisection.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT_BYTES = 512
"""Of a piece's first byte in its segment; more than any type or a cache line asks for."""
SEGMENT_BYTES = 256 * 2**20
"""Eight ranks of a node waste less than 2 GiB in their last segments, and 200 GiB are 800 calls to page-lock memory."""
SMALLEST_PIECE_BYTES = 2**20
"""Cut smaller, a copy over PCIe takes less time than asking for it."""


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
    """Takes and frees tensors in segments of host memory.

    Args:
        new_segment: so many bytes of host memory, uint8[num_bytes]; a multiple of `segment_bytes`.
        smallest_piece_bytes: into which tensors may be cut.
    """

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
        """Memory for a tensor [n, ...]; its contents are whatever was there.

        Raises:
            What `new_segment` raises; then nothing is taken.
        """
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
        """Of whoever took it."""
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
