"""First transfer of every group of a rank, before the first step.

NCCL makes a communicator at a group's first transfer, and both ends have to be in it: the host blocks until the other
rank comes. In a step, two neighbours would each wait in the first receive of another channel, for ever. So every
group moves one element at start, in an order that is the same on all ranks that meet: collectives by kind, then the
channels of a pipeline from its first stage to its last, each group once where channels share it. The order is total, so
no circle of waits is possible.

Price: one transfer of a few bytes a group and start (0.1 to 1 s a communicator on NCCL by its documentation).
"""

import torch
import torch.distributed as dist

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.device import wait_for


def warm_up(mesh: Mesh) -> int:
    """Use every group of this rank once; the number of transfers made. Collective; `RankLostError` where a rank does
    not come."""
    one = torch.ones(1, device=mesh.device)
    groups = [mesh.data] if mesh.data_size > 1 else []
    groups += [] if mesh.tie is None else [mesh.tie]
    groups += [group.process_group for group in mesh.context.values()]
    with mesh.watch.waiting("the first transfer of every group"):
        if mesh.tensor is not None:
            mesh.tensor.all_reduce(one.clone(), "the first transfer of the tensor-parallel group")
        for group in groups:
            dist.all_reduce(one.clone(), group=group)
        num_channels = _warm_channels(mesh, one)
        wait_for(mesh.device)
    return len(groups) + (mesh.tensor is not None) + num_channels


def _warm_channels(mesh: Mesh, one: torch.Tensor) -> int:
    used: set[dist.ProcessGroup] = set()
    for stage in range(mesh.layout.num_stages - 1):
        # (receiving stage, its channel, sending stage) of both directions between `stage` and the next.
        ends = ((stage + 1, mesh.forward.get(stage + 1), stage), (stage, mesh.backward.get(stage), stage + 1))
        for receiver, group, sender in ends:
            if group is None or group in used:
                continue
            to, source = mesh.rank_of_stage(receiver), mesh.rank_of_stage(sender)
            if mesh.rank == source:
                dist.send(one, to, group=group)
            else:
                dist.recv(one.clone(), source, group=group)
            used.add(group)
    return len(used)
