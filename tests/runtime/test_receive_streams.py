"""Memory of posted receives on a GPU, on streams that the test runs (`fake_streams`): behind what used it before, and
no more of it than posted receives, however far the host is ahead."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from evenload.runtime.comm.channels import Carried, ChannelEnd
from fake_streams import Device

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["transfers at once", "transfers late"])
def device(request, monkeypatch):
    return Device(copies_at_once=request.param).replace(monkeypatch)


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
    carried = Carried(hidden_size=2, dtype=torch.float64, device=CPU, watch=watch, stream=device.Stream(CPU))
    return ChannelEnd(("F", 1), None, 0, carried)


def test_a_receive_is_read_behind_its_transfer_and_written_behind_the_last_reader_of_its_memory(
    device, line, monkeypatch
):
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
