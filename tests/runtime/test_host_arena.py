"""The arena of host memory by itself: nothing that lives overlaps, holes join, and hardly more is held than lived."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenload.runtime.replay.host_copies import ALIGNMENT_BYTES, HostArena, HostRows
from evenload.types.model import MODELS
from offload_orders import follow, new_segment, offload_order, plans_of

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
        assert arena.num_holes <= num_pieces + num_segments
    for rows, _, _ in live:
        arena.free(rows)
    assert arena.live_bytes == 0
    # All holes are whole segments again, of which growth may have made large ones.
    whole = arena.take(torch.Size((1, SEGMENT)), torch.uint8)
    assert len(whole.pieces) == 1 or not arena.held_bytes
    arena.free(whole)


@given(moves)
def test_it_grows_only_where_no_hole_is_worth_a_piece(moves):
    arena = small_arena()
    live: list[HostRows] = []
    for move in moves:
        if isinstance(move, int):
            if live:
                arena.free(live.pop(move % len(live)))
            continue
        num_rows, width, dtype = move
        before, holes = arena.held_bytes, arena.num_holes
        live.append(arena.take(torch.Size((num_rows, width)), dtype))
        if arena.held_bytes > before:
            # Before it grew, what was free lay in holes too small for a piece or for a row, and the new segments are
            # the least that held the rest.
            wasted = holes * (max(PIECE, width * dtype.itemsize) + ALIGNMENT_BYTES)
            assert arena.held_bytes - arena.live_bytes < SEGMENT + wasted


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.data())
def test_rows_of_pieces_are_the_rows_of_the_tensor(sizes, data):
    whole = torch.arange(2 * sum(sizes)).view(-1, 2)
    rows = HostRows(whole.split(sizes), ())
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert torch.equal(torch.cat(rows.rows(slice(start, stop))), whole[start:stop])


def test_the_smallest_hole_that_fits_is_taken_and_neighbours_join():
    arena = small_arena()
    sizes = (1024, 512, 2048, 512, 1536, 512)
    taken = [arena.take(torch.Size((size, 1)), torch.uint8) for size in sizes]
    starts = [rows.pieces[0].storage_offset() for rows in taken]
    assert starts == [0, 1024, 1536, 3584, 4096, 5632]
    for at in (0, 2, 4):
        arena.free(taken[at])
    assert arena.take(torch.Size((1500, 1)), torch.uint8).pieces[0].storage_offset() == 4096
    arena.free(taken[1])
    assert arena.take(torch.Size((3584, 1)), torch.uint8).pieces[0].storage_offset() == 0
    assert arena.held_bytes == SEGMENT


def test_a_tensor_is_cut_over_holes_before_the_arena_grows():
    arena = small_arena()
    taken = [arena.take(torch.Size((2048, 1)), torch.uint8) for _ in range(4)]
    for at in (0, 2):
        arena.free(taken[at])
    rows = arena.take(torch.Size((40, 100)), torch.uint8)
    assert [len(piece) for piece in rows.pieces] == [20, 20]
    assert arena.held_bytes == SEGMENT
    arena.free(taken[1])
    more = arena.take(torch.Size((50, 100)), torch.uint8)
    assert [len(piece) for piece in more.pieces] == [20, 30]
    assert arena.held_bytes == 2 * SEGMENT


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


@pytest.mark.parametrize(
    ("table", "context", "strategy"), [("github_dirs", 65_536, "slimpack"), ("books", 262_144, "best_fit")]
)
def test_real_steps_hold_what_their_tensors_take(table, context, strategy):
    """In the order of a plan's actions, one step after the other: less than the 1 % for which `cost.host_memory` has
    room."""
    model = MODELS["llama-150b"]
    plans = plans_of(model, {"dp": 4, "pp": 2, "tp": 8, "virtual": 2}, table, context, strategy)
    arena = HostArena(new_segment)
    peaks = [follow(list(offload_order(plan, model, 0, 1)), arena) for plan in plans]
    assert max(peaks) > 2**36
    assert arena.held_bytes <= 1.01 * max(peaks)
    assert arena.live_bytes == 0
