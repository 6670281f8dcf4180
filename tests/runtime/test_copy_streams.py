"""Order of streams and events of offload copies, on streams that the test runs as unfavourably as their order allows
(`fake_streams`)."""

import pytest
import torch

from evenload.runtime.replay import host_copies
from evenload.runtime.replay.host_copies import CudaHostCopies
from fake_streams import Device


@pytest.fixture(params=[True, False], ids=["copies at once", "copies late"])
def device(request, monkeypatch):
    found = Device(copies_at_once=request.param).replace(monkeypatch)
    monkeypatch.setattr(host_copies, "_copy_rows", found.copy_rows)
    return found


CPU = torch.device("cpu")


def test_what_comes_back_is_what_kernels_wrote_before_it_left(device):
    """Out waits for the kernels that write; whoever reads waits for the way back, without the host."""
    copies = CudaHostCopies(CPU)
    tensor, seen = torch.full((6, 2), torch.nan), []
    device.compute.queue(lambda: tensor.copy_(torch.arange(12.0).view(6, 2)))
    parts = [copies.to_host(part) for part in (tensor[:4], tensor[4:])]
    for _, copy in parts:
        copy.release()
    back, copy = copies.to_device([host for host, _ in parts], CPU)
    copy.wait()
    device.compute.queue(lambda: seen.append(back.clone()))
    device.end()
    assert torch.equal(seen[0], torch.arange(12.0).view(6, 2))


def test_a_buffer_is_filled_after_the_last_kernel_that_reads_its_memory(device, monkeypatch):
    """The allocator hands memory out in the order of the computing stream, whose kernels may not have run yet."""
    copies = CudaHostCopies(CPU)
    memory, seen = torch.ones(3, 2), []
    device.compute.queue(lambda: seen.append(memory.clone()))
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: memory)
    _, copy = copies.to_device([torch.zeros(3, 2)], CPU)
    copy.wait()
    device.compute.queue(lambda: seen.append(memory.clone()))
    device.end()
    assert torch.equal(seen[0], torch.ones(3, 2))
    assert torch.equal(seen[1], torch.zeros(3, 2))


def test_memory_on_the_device_is_kept_until_its_copy_has_run(device):
    """In both directions the allocator is told, after the copy was queued; host memory is none of its business."""
    copies = CudaHostCopies(CPU)
    tensor = torch.zeros(3, 2)
    host, _ = copies.to_host(tensor)
    back, _ = copies.to_device([host], CPU)
    (out, *out_at), (into, *into_at) = device.recorded
    assert out is tensor
    assert into is back
    # Entries of the copying stream: a wait and a copy each.
    assert out_at == [device.copying, 2]
    assert into_at == [device.copying, 4]


def test_later_kernels_do_not_wait_for_copies_that_nobody_asked_for(device):
    """Copies run beside the computation: only `wait` orders what follows."""
    copies = CudaHostCopies(CPU)
    _, copy = copies.to_host(torch.zeros(3, 2))
    copy.release()
    assert device.compute.entries == []
    copy.wait()
    assert len(device.compute.entries) == 1
