"""Copies to the host, posted receives and optimizer state in streams of their own, on streams that the test runs as
unfavourably as their order allows (`fake_streams`): what is read comes after what writes it, and memory is used again
after its last reader."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from evenload.errors import ConfigError
from evenload.planning.layouts.moves import Move, Moves, Piece
from evenload.runtime.comm.channels import ChannelEnd, TransferSettings
from evenload.runtime.device import HostClock
from evenload.runtime.replay import host_copies
from evenload.runtime.replay.host_copies import SEGMENT_BYTES, CudaHostCopies
from evenload.runtime.replay.store import ActivationStore
from evenload.runtime.stages import arrival as arrival_module
from evenload.runtime.stages.arrival import Arrival
from evenload.types.document import Range
from evenload.types.layout import even_layout
from fake_streams import Device


@pytest.fixture(params=[True, False], ids=["copies at once", "copies late"])
def device(request, monkeypatch):
    result = Device(copies_at_once=request.param).replace(monkeypatch)
    monkeypatch.setattr(host_copies, "_copy_rows", result.copy_rows)
    monkeypatch.setattr(arrival_module, "step_clock", lambda device: HostClock())
    return result


CPU = torch.device("cpu")


def test_what_comes_back_is_what_kernels_wrote_before_it_left(device):
    """Out waits for the kernels that write; whoever reads waits for the way back, without the host."""
    copies = CudaHostCopies(CPU)
    tensor, seen = torch.full((6, 2), torch.nan), []
    device.compute.queue(lambda: tensor.copy_(torch.arange(12.0).view(6, 2)))
    parts = [copies.to_host(part) for part in (tensor[:4], tensor[4:])]
    for _, copy in parts:
        copy()
    back, copy = copies.to_device([piece for host, _ in parts for piece in host.pieces], CPU)
    copy()
    device.compute.queue(lambda: seen.append(back.clone()))
    device.end()
    assert torch.equal(seen[0], torch.arange(12.0).view(6, 2))


def test_a_buffer_is_filled_after_the_last_kernel_that_reads_its_memory(device, monkeypatch):
    """The allocator hands memory out in the order of the computing stream, whose kernels may not have run yet."""
    copies = CudaHostCopies(CPU)
    memory, seen = torch.ones(3, 2), []
    device.compute.queue(lambda: seen.append(memory.clone()))
    host, _ = copies.to_host(torch.zeros(3, 2))
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: memory)
    _, copy = copies.to_device(host.pieces, CPU)
    copy()
    device.compute.queue(lambda: seen.append(memory.clone()))
    device.end()
    assert torch.equal(seen[0], torch.ones(3, 2))
    assert torch.equal(seen[1], torch.zeros(3, 2))


def test_memory_on_the_device_is_free_when_later_kernels_come_behind_its_copy(monkeypatch):
    """Not before, or they would write what is being copied; and not only when the copy has run."""
    device = Device(copies_at_once=True).replace(monkeypatch)
    monkeypatch.setattr(host_copies, "_copy_rows", lambda moves: None)
    copies = CudaHostCopies(CPU)
    tensor = torch.zeros(3, 2)
    held = weakref.ref(tensor)
    _, copy = copies.to_host(tensor)
    del tensor
    assert held() is not None
    assert device.compute.entries == []
    copy()
    assert held() is None
    assert len(device.compute.entries) == 1
    assert device.recorded == []


def test_at_most_two_layers_of_offloaded_tensors_are_on_the_device(monkeypatch):
    """Counted by tensors that live: the bound is the device's, not only that of what the host counts."""
    device = Device(copies_at_once=True).replace(monkeypatch)
    monkeypatch.setattr(host_copies, "_copy_rows", lambda moves: None)
    ranges = (Range(0, 0, 4),)
    store = ActivationStore({0: 4}, (ranges,), policies={0: "offload"}, copies=CudaHostCopies(CPU))
    alive, most = [], 0
    store.open_pack(ranges)
    for layer in range(6):
        tensor = torch.zeros(4, 2)
        alive.append(weakref.ref(tensor))
        store.record((layer, "input"), tensor)
        del tensor
        most = max(most, sum(one() is not None for one in alive))
        store.end_layer(layer)
    assert most == 2
    store.close_pack()
    assert not any(one() is not None for one in alive)
    # All of the copies' way back is behind some point of the computing stream.
    assert len(device.compute.entries) == 6
    assert device.recorded == []


def test_host_memory_is_written_again_after_the_last_copy_that_reads_it(device):
    """It is freed while that copy is only asked for: another stream, or an order of another kind, would mix them up."""
    copies = CudaHostCopies(CPU)
    backs, places = [], []
    for value in range(4):
        host, out = copies.to_host(torch.full((5, 3), float(value)))
        places.append(host.pieces[0].data_ptr())
        out()
        back, copy = copies.to_device(host.pieces, CPU)
        copies.arena.free(host)
        backs.append((back, copy))
    assert len(set(places)) == 1
    for _, copy in backs:
        copy()
    device.end()
    assert [back.unique().tolist() for back, _ in backs] == [[0.0], [1.0], [2.0], [3.0]]


def test_memory_that_cuda_does_not_lock_is_an_error_that_says_what_to_do(device):
    copies = CudaHostCopies(CPU)
    copies.to_host(torch.zeros(3, 2))
    device.cuda.refuses = True
    with pytest.raises(ConfigError, match=r"256 MiB more host memory .* this process has 256 MiB") as refusal:
        copies.to_host(torch.zeros(SEGMENT_BYTES, dtype=torch.uint8))
    for part in ("ulimit -l", "plan.host_memory_bytes", 'plan.options.policy = "recompute"'):
        assert part in str(refusal.value)
    assert copies.arena.live_bytes == 512


@pytest.fixture
def line(device, monkeypatch):
    """A line whose pack number n arrives as a tensor of n."""

    def irecv(tensor, peer, group):
        stream = device.current_stream(CPU)
        packs = next(numbers)
        stream.queue(lambda: tensor.fill_(packs))
        return SimpleNamespace(wait=lambda: device.compute.wait_stream(stream))

    numbers = iter(range(100))
    monkeypatch.setattr(dist, "irecv", irecv)
    watch = SimpleNamespace(waiting=lambda *_: nullcontext())
    carried = TransferSettings(hidden_size=2, dtype=torch.float64, device=CPU, watch=watch, stream=device.Stream(CPU))
    return ChannelEnd(("F", 1), None, 0, carried)


def test_a_receive_is_read_behind_its_transfer_and_written_behind_the_last_reader(device, line, monkeypatch):
    memory, seen = torch.full((3, 2), -1.0, dtype=torch.float64), []
    device.compute.queue(lambda: seen.append(memory.clone()))
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: memory)
    tensor = line.post_receive(0, 3)()
    device.compute.queue(lambda: seen.append(tensor.clone()))
    device.end()
    assert [float(one.mean()) for one in seen] == [-1.0, 0.0]


def test_received_tensors_go_when_the_host_lets_them_go(device, line):
    """The allocator is told of no second stream, for which it would keep memory until the device is there."""
    alive, posted = [], [line.post_receive(pack, 3) for pack in range(2)]
    for pack in range(2, 8):
        tensor = posted.pop(0)()
        alive.append(weakref.ref(tensor))
        del tensor
        posted.append(line.post_receive(pack, 3))
    # What the stand-ins for transfers hold goes with them.
    device.end()
    device.copying.entries.clear()
    assert [one() for one in alive] == [None] * 6
    assert device.recorded == []


def mesh(dp: int) -> SimpleNamespace:
    watch = SimpleNamespace(waiting=lambda what: nullcontext())
    gpu = SimpleNamespace(type="cuda")
    return SimpleNamespace(
        layout=even_layout(2, dp=dp), rank=0, pp_rank=0, data_rank=0, data_size=dp, device=gpu, watch=watch, moving=None
    )


def arrival_of(live: SimpleNamespace, moves: Moves, weights, before) -> Arrival:
    return Arrival([live], None, moves, mesh(1), mesh(2), weights, before, 0)


def test_state_waits_for_the_update_before_and_not_for_the_step_behind_which_it_moves(device, monkeypatch):
    old, seen = torch.full((4,), torch.nan), []

    def keep(arrival, after) -> None:
        kept = after[0]["exp_avg"]
        device.current_stream(arrival._new.device).queue(lambda: kept.copy_(old[: len(kept)]))

    monkeypatch.setattr(Arrival, "_keep_all", keep)
    live = SimpleNamespace(
        piece=Piece(unit=0, num_elements=4, weight_bytes=4, state_bytes=4),
        is_held=True,
        is_trained=True,
        shared=None,
        state_names=("exp_avg",),
        buffer=SimpleNamespace(grads=torch.zeros(4)),
        share_in=lambda mesh: (0, 4 // mesh.data_size),
    )
    device.compute.queue(lambda: old.copy_(torch.arange(4.0)))
    arrival = arrival_of(live, Moves(weights=(), state=()), {}, {0: {"exp_avg": old}})
    arrival.thread.join()
    ordered_behind = len(device.compute.entries)
    device.compute.queue(lambda: seen.append("step"))
    device.copying.run()
    # All of the second stream ran; of the first, no more than what was there before.
    assert device.compute.num_done == ordered_behind == 1
    after = arrival.wait()
    device.compute.queue(lambda: seen.append(after[0]["exp_avg"].clone()))
    device.end()
    assert seen[0] == "step"
    assert seen[1].tolist() == [0.0, 1.0]
    ((tensor, stream, _),) = device.recorded
    assert (tensor is after[0]["exp_avg"], stream) == (True, device.compute)


def test_a_forward_is_computed_behind_the_weights_of_its_unit_and_before_later_ones(device, monkeypatch):
    """Weights come over NCCL: a wait for a receive queues it, and old ones stay until what sent them is done."""
    memory, seen, stayed = {0: torch.full((2,), torch.nan), 1: torch.full((2,), torch.nan)}, [], []
    given, kept = dict(memory), weakref.ref(memory[1])

    def receive(ops) -> list:
        into = ops[0].tensor
        fill = lambda: into.fill_(7.0)  # noqa: E731
        return [SimpleNamespace(wait=lambda: device.current_stream(CPU).queue(fill))]

    def synchronize(stream) -> None:
        stayed.append(kept() is not None)

    monkeypatch.setattr(type(device.copying), "synchronize", synchronize)
    monkeypatch.setattr(dist, "P2POp", lambda way, tensor, other, group: SimpleNamespace(tensor=tensor))
    monkeypatch.setattr(dist, "batch_isend_irecv", receive)
    shape = {"is_held": True, "is_trained": False, "shared": None}
    lives = [SimpleNamespace(piece=Piece(unit=unit, num_elements=2, weight_bytes=4), **shape) for unit in range(2)]
    weights = tuple(Move(piece=index, source=1, target=0, start=0, stop=2) for index in range(2))
    arrival = Arrival(lives, None, Moves(weights=weights, state=()), mesh(1), mesh(2), given, {}, 0)
    arrival.thread.join()
    for unit in range(2):
        arrival.await_unit(unit)
        device.compute.queue(lambda unit=unit: seen.append(memory[unit].tolist()))
        if unit == 0 and not device._copies_at_once:
            device.compute.run()
            assert memory[1].isnan().all(), "a forward waits for a later unit"
    device.end()
    assert seen == [[7.0, 7.0]] * 2
    assert stayed[0]
    assert not given
    assert arrival.weight_bytes == 16
