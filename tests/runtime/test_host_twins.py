"""The node's file through which GPUs move pieces: what is read is what was offered in this switch, and copies come
behind what made them."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from evenload.planning.layouts.moves import Move, Piece, shared_bytes, shared_pieces
from evenload.runtime.stages.twin_layer import WEIGHTS, HostTwins, OtherProcess, TwinError, place_pieces
from evenload.types.layout import even_layout
from fake_streams import Device

PARTS = [{WEIGHTS: torch.float32, "exp_avg": torch.float64}, None, {WEIGHTS: torch.float32}]
CAPACITIES = [10, 20, 6]
CPU = torch.device("cpu")


def ranks_of_a_node(device: object = CPU, patience_s: float = 0.2) -> list[HostTwins]:
    """Two ranks, each with a map of its own of one file."""
    shape = torch.Size((2, 2, len(PARTS)))
    own, pieces = place_pieces(PARTS, CAPACITIES, shape.numel())
    mapped = [(own, pieces), place_pieces(PARTS, CAPACITIES, shape.numel(), own.address)]
    result = []
    for rank, (memory, places) in enumerate(mapped):
        marks = memory.tensor(0, shape.numel(), torch.int64).view(shape)
        others = {other: OtherProcess(own.address[0]) for other in range(2)}
        mesh = SimpleNamespace(rank=rank, device=device)
        result.append(HostTwins(memory, others, places, marks, mesh, patience_s))
    return result


def move(piece: int, start: int, stop: int) -> Move:
    return Move(piece=piece, source=0, target=1, start=start, stop=stop)


def test_ranges_of_state_are_read_once_all_of_a_piece_are_there():
    first, second = ranks_of_a_node()
    state, begins = torch.arange(10.0, dtype=torch.float64), threading.Event()
    first._thread.submit(begins.wait)
    moves = [move(0, 1, 4), move(0, 6, 10), move(0, 1, 4)]
    first.offer(moves, lambda one: {"exp_avg": state[one.start : one.stop]}, lambda piece: 3)
    into = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(dist.DistNetworkError, match="timed out: rank 0 was to have exp_avg of piece 0 in host memory"):
        second.fetch(moves[0], {"exp_avg": into}, 3)
    begins.set()
    second.fetch(moves[0], {"exp_avg": into}, 3)
    assert into.tolist() == [1.0, 2.0, 3.0]
    # Weights of the piece are marked on their own.
    with pytest.raises(
        dist.DistNetworkError, match="weights of piece 0 in host memory after 3 updates, and has nothing"
    ):
        second.fetch(move(0, 0, 10), {WEIGHTS: torch.zeros(10)}, 3)


def test_what_was_offered_before_is_not_taken_for_what_is_offered_now():
    """A step that was left out: two switches after the same number of updates, which take other elements."""
    first, second = ranks_of_a_node()
    state, into = torch.arange(10.0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    given = lambda one: {"exp_avg": state[one.start : one.stop]}  # noqa: E731
    first.offer([move(0, 0, 2)], given, lambda piece: 3)
    second.fetch(move(0, 0, 2), {"exp_avg": into}, 3)
    first.withdraw(())
    with pytest.raises(dist.DistNetworkError, match="and has nothing"):
        second.fetch(move(0, 4, 6), {"exp_avg": into}, 3)
    first.offer([move(0, 4, 6)], given, lambda piece: 3)
    second.fetch(move(0, 4, 6), {"exp_avg": into}, 3)
    assert into.tolist() == [4.0, 5.0]
    with pytest.raises(TwinError, match="ranks disagree"):
        second.fetch(move(0, 4, 6), {"exp_avg": into}, 2)


def test_a_copy_that_fails_is_told_when_the_switch_ends():
    first, _ = ranks_of_a_node()
    first.offer([move(2, 0, 6)], lambda one: {WEIGHTS: torch.zeros(7)}, lambda piece: 1)
    with pytest.raises(RuntimeError, match="size"):
        first.withdraw(())


@pytest.mark.parametrize("copies_at_once", [True, False])
def test_pieces_leave_a_device_behind_what_computes_them_and_are_marked_when_they_are_there(
    copies_at_once, monkeypatch
):
    device = Device(copies_at_once=copies_at_once).replace(monkeypatch)
    first, second = ranks_of_a_node(SimpleNamespace(type="cuda"))
    weights, copy = torch.full((6,), torch.nan), torch.Tensor.copy_

    def queued(into, source, *, non_blocking=False) -> None:
        assert non_blocking
        device.current_stream(CPU).queue(lambda: copy(into, source))

    device.compute.queue(lambda: weights.fill_(5.0))
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", queued)
        first.offer([move(2, 0, 6)], lambda one: {WEIGHTS: weights}, lambda piece: 0)
        first._copies[0].result()
    assert second.pieces[2].tensor(WEIGHTS).tolist() == [5.0] * 6
    assert int(second._marks[0][0, 2]) == 0


def test_a_node_has_one_place_for_what_several_ranks_hold():
    piece, layouts = Piece(unit=0, num_elements=10, weight_bytes=2, state_bytes=12), [even_layout(2, dp=4)]
    assert shared_bytes(piece, layouts, 4) == 10 * (4 * 2 + 12)
    assert shared_bytes(piece, layouts, 4, via_host=True) == 10 * (2 + 12)
    assert shared_pieces([piece, piece], layouts, 4, 10 * 14, via_host=True) == {0}
