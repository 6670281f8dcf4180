"""The arena of host memory by itself: nothing that lives overlaps, holes join, and hardly more is held than lived."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload.runtime.replay.host_copies import ALIGNMENT_BYTES, HostArena, HostRows

SEGMENT, PIECE = 8192, 1024
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.uint8)


def plain(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def small_arena() -> HostArena:
    return HostArena(plain, segment_bytes=SEGMENT, smallest_piece_bytes=PIECE)


def fill(rows: HostRows, value: int) -> None:
    for piece in rows.pieces:
        piece.fill_(value)


tensors = st.tuples(st.integers(0, 40), st.integers(0, 300), st.sampled_from(DTYPES))
moves = st.lists(st.one_of(tensors, st.integers(0, 2**16)), min_size=1, max_size=60)


@given(moves)
def test_live_tensors_keep_what_was_written_and_little_more_is_held(moves):
    """A number frees one of the tensors that live; the others must not notice."""
    arena = small_arena()
    live: list[tuple[HostRows, int, tuple]] = []
    row_bytes = 0
    for at, move in enumerate(moves):
        if isinstance(move, int):
            if live:
                rows, value, _ = live.pop(move % len(live))
                assert all((piece == value).all() for piece in rows.pieces)
                arena.free(rows)
        else:
            num_rows, width, dtype = move
            rows = arena.take(torch.Size((num_rows, width)), dtype)
            assert sum(piece.shape[0] for piece in rows.pieces) == num_rows
            for piece in rows.pieces:
                assert (piece.dtype, piece.shape[1], piece.is_contiguous()) == (dtype, width, True)
                assert piece.storage_offset() * dtype.itemsize % ALIGNMENT_BYTES == 0
            fill(rows, at)
            live.append((rows, at, move))
            row_bytes = max(row_bytes, width * dtype.itemsize)
        for rows, value, _ in live:
            assert all((piece == value).all() for piece in rows.pieces)
        exact = sum(n * width * dtype.itemsize for _, _, (n, width, dtype) in live)
        num_pieces = sum(len(rows.spans) for rows, _, _ in live)
        assert exact <= arena.live_bytes <= exact + num_pieces * ALIGNMENT_BYTES
        assert arena.live_bytes <= arena.peak_live_bytes
        # Each hole ends a segment's run of free bytes: behind a piece that lives, or at a segment's start.
        num_segments = arena.held_bytes // SEGMENT
        assert len(arena._holes) <= num_pieces + num_segments
    for rows, _, _ in live:
        arena.free(rows)
    assert arena.live_bytes == 0
    # All holes are whole segments again, of which growth may have made large ones.
    whole = arena.take(torch.Size((1, SEGMENT)), torch.uint8)
    assert len(whole.pieces) == 1 or not arena.held_bytes
    arena.free(whole)


def test_where_it_cannot_grow_nothing_is_taken():
    def refuse(num_bytes: int) -> torch.Tensor:
        if segments:
            raise MemoryError
        segments.append(num_bytes)
        return plain(num_bytes)

    segments: list[int] = []
    arena = HostArena(refuse, segment_bytes=SEGMENT, smallest_piece_bytes=PIECE)
    kept = arena.take(torch.Size((4096, 1)), torch.uint8)
    with pytest.raises(MemoryError):
        arena.take(torch.Size((5000, 1)), torch.uint8)
    assert arena.live_bytes == 4096
    arena.take(torch.Size((4096, 1)), torch.uint8)
    arena.free_all()
    assert arena.live_bytes == 0
    assert arena.take(torch.Size((SEGMENT, 1)), torch.uint8).pieces[0].data_ptr() == kept.pieces[0].data_ptr()
