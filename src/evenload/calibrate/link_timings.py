"""Seconds of transfers between the ranks of a run, and to host memory: latency and bandwidth of every link it uses."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from evenload.runtime.comm.cp_groups import ContextGroup
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import seconds_now

LinkTiming = tuple[float, float]
"""(bytes per second, latency_s) of one transfer from a rank to the next."""

_SMALL, _LARGE = 16, 1 << 20
_ELEMENT_BYTES = 4


def time_link(mesh: Mesh) -> LinkTiming | None:
    """To the next stage, or to the next replica; None for a rank that takes no part, or is alone."""
    if mesh.layout.pp > 1:
        ends = [mesh.rank_of_stage(stage) for stage in (0, 1)]
        if mesh.rank not in ends or 1 not in mesh.forward:
            return None
        group, me = mesh.forward[1], int(mesh.rank != min(ends))  # members of a group are in rank order
    else:
        group, me = mesh.data, mesh.data_rank
        if mesh.data_size == 1 or me > 1:
            return None
    bandwidth, latency_s = _timed(lambda n: _ping(torch.zeros(n, device=mesh.device), group, me))
    return max(bandwidth, 1.0), latency_s


def time_context(mesh: Mesh) -> LinkTiming | None:
    """Round the largest group that may share documents, from an all-gather and a reduce-scatter by all groups at once;
    None where documents are never shared."""
    if not mesh.context:
        return None
    largest = max(mesh.context, key=lambda block: block.size)
    return _time_group(mesh.context[largest], mesh.device)


def time_reduction(mesh: Mesh) -> LinkTiming | None:
    """As `time_context`, of the ranks that hold the same weights and sum their gradients; None where there is one."""
    return None if mesh.data_size == 1 else _time_group(ContextGroup(mesh.data, mesh.watch), mesh.device)


def _time_group(group: ContextGroup, device: torch.device) -> LinkTiming:
    def both(num_elements: int) -> float:
        rows = torch.zeros(num_elements, device=device)
        gathered = torch.zeros(group.size * num_elements, device=device)
        gather_s = fastest(lambda: group.all_gather(rows, "calibration").wait(), device)
        return (gather_s + fastest(lambda: group.reduce_scatter(gathered, "calibration").wait(), device)) / 2

    return _timed(both, group.size - 1)


def time_tensor(mesh: Mesh) -> LinkTiming | None:
    """Round a tensor-parallel group; None where there is none."""
    group = mesh.tensor
    if group is None:
        return None

    def gather(num_elements: int) -> float:
        own = torch.zeros(num_elements, device=mesh.device)
        return fastest(functools.partial(group.all_gather, own, "calibration"), mesh.device)

    return _timed(gather, group.shard.size - 1)


def time_host_link(device: torch.device) -> LinkTiming | None:
    """To pinned host memory, for offloading; None on a CPU, where it saves nothing. All ranks at once, as in a step."""
    if device.type != "cuda":
        return None

    def copy_s(num_bytes: int) -> float:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        rows = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return fastest(lambda: host.copy_(rows, non_blocking=True), device)

    small, large = copy_s(64), copy_s(1 << 28)
    return (1 << 28) / max(large - small, 1e-9), small


def _timed(seconds: Callable[[int], float], transfers: int = 1) -> LinkTiming:
    """From the seconds of a few and of many fp32 elements that make so many transfers one after the other."""
    small, large = seconds(_SMALL), seconds(_LARGE)
    return transfers * _ELEMENT_BYTES * _LARGE / max(large - small, 1e-9), small / transfers


def _ping(tensor: torch.Tensor, group: dist.ProcessGroup, me: int) -> float:
    """Half a round trip between the first two ranks of a group."""
    peer = dist.get_global_rank(group, 1 - me)

    def there_and_back() -> None:
        if me == 0:
            dist.send(tensor, peer, group=group)
            dist.recv(tensor, peer, group=group)
        else:
            dist.recv(tensor, peer, group=group)
            dist.send(tensor, peer, group=group)

    return fastest(there_and_back, tensor.device) / 2


def fastest(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that does not count."""
    work()
    seconds = []
    for _ in range(repeats):
        start_s = seconds_now(device)
        work()
        seconds.append(seconds_now(device) - start_s)
    return min(seconds)
