"""First transfer of every group of a rank, before the first step.

NCCL makes a communicator at a group's first transfer, and both ends have to be in it: the host blocks until the other
rank comes. In a step, two neighbours would each wait in the first receive of another channel, for ever. So every
group moves one element at start, in an order that is the same on all ranks that meet: collectives by kind, then the
channels of a pipeline from its first stage to its last, each group once where channels or layouts share it. The order
is total, so no circle of waits is possible.

Price: one transfer of a few bytes a group and start (0.1 to 1 s a communicator on NCCL by its documentation).
"""

import torch
import torch.distributed as dist

from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.device import wait_for


def warm_up(meshes: Mesh | Meshes) -> int:
    """Use every group of this rank once, layout by layout; the number of transfers made. Collective; `RankLostError`
    where a rank does not come."""
    of_layouts = [meshes] if isinstance(meshes, Mesh) else [meshes.of(layout) for layout in meshes.layouts]
    used: set[dist.ProcessGroup] = set()
    for mesh in of_layouts:
        one = torch.ones(1, device=mesh.device)
        groups = [mesh.data] if mesh.data_size > 1 and not mesh.is_idle else []
        groups += [] if mesh.tensor is None else [mesh.tensor.process_group]
        groups += [group for group in (mesh.moving, mesh.tie) if group is not None]
        groups += [group.process_group for group in mesh.context.values()]
        with mesh.watch.waiting("the first transfer of every group"):
            for group in groups:
                if group not in used:
                    dist.all_reduce(one.clone(), group=group)
                    used.add(group)
            _warm_channels(mesh, one, used)
            wait_for(mesh.device)
    return len(used)


def _warm_channels(mesh: Mesh, one: torch.Tensor, used: set[dist.ProcessGroup]) -> None:
    """Those that earlier layouts have not `used`, which grows."""
    for stage in range(mesh.layout.num_stages - 1):
        # Of both directions between `stage` and the next; to several ranks in their order.
        for wanted in (("F", stage + 1), ("B", stage)):
            for channel, group in mesh.lines.items():
                if channel[:2] != wanted or group in used:
                    continue
                if mesh.receives_on(channel):
                    dist.recv(one.clone(), mesh.other_end(channel), group=group)
                else:
                    dist.send(one, mesh.other_end(channel), group=group)
                used.add(group)
