"""Seconds of transfers between the ranks of a run, and to host memory: latency and bandwidth of every link it uses."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from evenload.runtime.cp_groups import ContextGroup
from evenload.runtime.device import seconds_now
from evenload.runtime.mesh import Mesh


def time_link(mesh: Mesh) -> tuple[float, float] | None:
    """(latency_s, bytes per second) of one hop to the next stage, or to the next replica; None when alone."""
    if mesh.layout.pp > 1:
        ends = [mesh.rank_of_stage(stage) for stage in (0, 1)]
        if mesh.rank not in ends or 1 not in mesh.forward:
            return None
        group, me = mesh.forward[1], int(mesh.rank != min(ends))  # members of a group are in rank order
    else:
        group, me = mesh.data, mesh.data_rank
        if mesh.data_size == 1 or me > 1:
            return None
    small, large = (_ping(torch.zeros(n, device=mesh.device), group, me) for n in (16, 1 << 20))
    return small, max(4 * (1 << 20) / max(large - small, 1e-9), 1.0)


def time_context(mesh: Mesh) -> tuple[float, float] | None:
    """(bytes per second, latency_s) of one hop round the largest group that may share documents, from an all-gather
    and a reduce-scatter by all groups at once; None where documents are never shared."""
    if not mesh.context:
        return None
    block = max(mesh.context, key=lambda block: block[1])
    return _time_group(ContextGroup(mesh.context[block], mesh.watch), mesh.device)


def time_reduction(mesh: Mesh) -> tuple[float, float] | None:
    """As `time_context`, of the ranks that hold the same weights and sum their gradients; None where there is one."""
    return None if mesh.data_size == 1 else _time_group(ContextGroup(mesh.data, mesh.watch), mesh.device)


def _time_group(group: ContextGroup, device: torch.device) -> tuple[float, float]:
    def both(num_elements: int) -> float:
        rows = torch.zeros(num_elements, device=device)
        gathered = torch.zeros(group.size * num_elements, device=device)
        gather_s = fastest(lambda: group.all_gather(rows, "calibration").wait(), device)
        return (gather_s + fastest(lambda: group.reduce_scatter(gathered, "calibration").wait(), device)) / 2

    small, large = both(16), both(1 << 20)
    hops = group.size - 1
    return hops * 4 * (1 << 20) / max(large - small, 1e-9), small / hops


def time_tensor(mesh: Mesh) -> tuple[float, float] | None:
    """(bytes per second, latency_s) of one hop round a tensor-parallel group; None where there is none."""
    group = mesh.tensor
    if group is None:
        return None
    rows = [torch.zeros(n, device=mesh.device) for n in (16, 1 << 20)]
    small, large = (fastest(functools.partial(group.all_gather, own, "calibration"), mesh.device) for own in rows)
    hops = group.shard.size - 1
    return hops * 4 * (1 << 20) / max(large - small, 1e-9), small / hops


def time_host_link(device: torch.device) -> tuple[float, float] | None:
    """(bytes per second, latency_s) of copies to pinned host memory, for offloading; None on a CPU, where it saves
    nothing. All ranks at once, as in a step."""
    if device.type != "cuda":
        return None

    def copy_s(num_bytes: int) -> float:
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        rows = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return fastest(lambda: host.copy_(rows, non_blocking=True), device)

    small, large = copy_s(64), copy_s(1 << 28)
    return (1 << 28) / max(large - small, 1e-9), small


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
