"""Memory that processes of a machine read: pages come and go, values are what was written, nothing is left behind."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from evenload.runtime.replay.host_copies import PAGE_BYTES, touch
from evenload.runtime.stages.live_stages import LiveStages
from evenload.runtime.stages.twin_layer import WEIGHTS, OthersMemory, SparseMemory, TwinError, TwinMemory, place_pieces

SHARED_MEMORY = Path("/dev/shm")


def shared_files() -> set[Path]:
    """Without semaphores, which processes of other tests make and remove meanwhile."""
    return {path for path in SHARED_MEMORY.iterdir() if not path.name.startswith("sem.")}


def taken_bytes(memory: SparseMemory) -> int:
    """Of pages that were touched and not released."""
    return os.fstat(memory.address[1]).st_blocks * 512


def test_pages_are_taken_where_they_are_touched_and_given_back_whole():
    memory = SparseMemory(2**40)
    assert taken_bytes(memory) == 0
    values = memory.tensor(2**39, 3 * PAGE_BYTES // 4, torch.float32)
    assert taken_bytes(memory) == 0
    values.fill_(7.0)
    assert taken_bytes(memory) == 3 * PAGE_BYTES
    # The pages at both ends lie only partly in what is released.
    memory.release(2**39 + 4, 2**39 + 3 * PAGE_BYTES - 4)
    assert taken_bytes(memory) == 2 * PAGE_BYTES
    middle = slice(PAGE_BYTES // 4, 2 * PAGE_BYTES // 4)
    assert not values[middle].any()
    assert (values[: PAGE_BYTES // 4] == 7.0).all()
    assert (values[2 * PAGE_BYTES // 4 :] == 7.0).all()


def test_touching_takes_all_pages_of_a_tensor_and_no_other_bytes():
    memory = SparseMemory(2**20)
    whole = memory.tensor(0, 2**18, torch.float32)
    whole[:6] = 3.0
    touch(memory.tensor(24, 4 * PAGE_BYTES // 4, torch.float32))
    assert taken_bytes(memory) == 5 * PAGE_BYTES
    assert (whole[:6] == 3.0).all()


def test_another_process_is_read_while_it_lives_and_after_it_was_killed():
    """What it had stays for those that have it open; no file is left of it."""
    before = shared_files()
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(theirs,))
    process.start()
    address = ours.recv()
    other, result = OthersMemory(address), torch.empty(1000, dtype=torch.bfloat16)
    other.read(PAGE_BYTES, result)
    assert torch.equal(result, torch.arange(1000).to(torch.bfloat16))
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    again = torch.zeros_like(result)
    other.read(PAGE_BYTES, again)
    assert torch.equal(again, result)
    assert shared_files() <= before
    with pytest.raises(OSError, match="No such file"):
        OthersMemory(address)


def _hold(connection) -> None:
    memory = SparseMemory(2**20)
    memory.tensor(PAGE_BYTES, 1000, torch.bfloat16).copy_(torch.arange(1000))
    connection.send(memory.address)
    connection.recv()


def test_the_memory_of_another_process_than_the_one_that_told_is_refused():
    memory = SparseMemory(PAGE_BYTES)
    process, descriptor, number = memory.address
    with pytest.raises(OSError, match="is not the one"):
        OthersMemory((process, descriptor, number + 1))


PARTS = [{WEIGHTS: torch.float32, "exp_avg": torch.float64}, None]


@pytest.fixture
def two_ranks() -> list[TwinMemory]:
    placed = [place_pieces(PARTS, [10, 20], 2) for _ in range(2)]
    others = {rank: OthersMemory(own.address) for rank, (own, _) in enumerate(placed)}
    return [TwinMemory(own, others, pieces, 2, patience_s=0.2) for own, pieces in placed]


def test_a_twin_is_read_only_as_of_its_step(two_ranks):
    first, second = two_ranks
    mine = first.pieces[0]
    mine.tensor("exp_avg", 4, 8).copy_(torch.arange(4.0))
    into = torch.empty(2, dtype=torch.float64)
    first.mark(0, 8)
    with pytest.raises(TwinError, match=r"after 7 updates.* after 8 updates: ranks disagree"):
        second.read(0, "exp_avg", 0, 5, into, 7)
    for early in (None, 6):
        first.mark(0, early)
        with pytest.raises(
            dist.DistNetworkError, match="timed out: rank 0 was to have exp_avg of piece 0 in shared memory after 7"
        ):
            second.read(0, "exp_avg", 0, 5, into, 7)
    first.mark(0, 7)
    second.read(0, "exp_avg", 0, 5, into, 7)
    assert into.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("num_updates", [0, 1])
def test_nothing_is_offered_by_a_rank_that_has_only_made_its_memory(num_updates):
    """Fresh memory is zeros, and a run begins with 0 updates: a fast rank once read weights before they were there."""
    own, pieces = place_pieces(PARTS, [10, 20], 2)
    made, _ = place_pieces(PARTS, [10, 20], 2)
    second = TwinMemory(own, {0: OthersMemory(made.address)}, pieces, 2, patience_s=0.05)
    for piece in range(2):
        with pytest.raises(dist.DistNetworkError, match=f"piece {piece} in shared memory after {num_updates} updates"):
            second.read(piece, WEIGHTS, 0, 0, torch.empty(2), num_updates)


def test_who_reads_waits_until_it_is_offered(two_ranks):
    first, second = two_ranks
    into = torch.empty(2)

    def offer() -> None:
        first.pieces[0].tensor(WEIGHTS, 0, 2).fill_(5.0)
        first.mark(0, 3)

    later = threading.Timer(0.05, offer)
    later.start()
    second.read(0, WEIGHTS, 0, 0, into, 3)
    later.join()
    assert into.tolist() == [5.0, 5.0]


def test_a_reader_learns_at_once_that_a_rank_ends_before_it_offers():
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(theirs,))
    process.start()
    own, pieces = place_pieces(PARTS, [10, 20], 2)
    second = TwinMemory(own, {0: OthersMemory(ours.recv())}, pieces, 2, patience_s=1000.0)
    threading.Timer(0.05, process.kill).start()
    with pytest.raises(dist.DistNetworkError, match="has ended"):
        second.read(0, WEIGHTS, 0, 0, torch.empty(2), 3)
    process.join()


def test_places_do_not_overlap_and_only_shared_pieces_have_one(two_ranks):
    first, _ = two_ranks
    assert first.pieces.keys() == {0}
    assert not first.reaches(1, 1)
    assert first.reaches(0, 1)
    assert not first.reaches(0, 2)
    starts = sorted(first.pieces[0].offsets.values())
    assert starts == [PAGE_BYTES, 2 * PAGE_BYTES]


def test_optimizer_state_that_is_shared_takes_its_memory_before_the_first_step():
    """What the process holds beside its tensors is what it holds then without them (`ProcessMemory`)."""
    count, names = 2**16, ("exp_avg", "exp_avg_sq")
    own, places = place_pieces([dict.fromkeys(names, torch.float32)], [count], 1)
    live = SimpleNamespace(state_names=names, shared=places[0], share_in=lambda mesh: (0, count))
    values = torch.ones(count)
    buffer = SimpleNamespace(values=values, grads=torch.zeros(1), shard=lambda values, rank, size: values)
    here = SimpleNamespace(
        held=SimpleNamespace(buffers=[buffer]),
        mesh=SimpleNamespace(data_rank=0, data_size=1),
        _live_of=lambda group: live,
    )
    (state,) = LiveStages.initial_state(here)
    assert taken_bytes(own) == 2 * 4 * count + PAGE_BYTES, "and marks"
    assert set(state) == set(names)
    assert not any(tensor.any() for tensor in state.values())
