"""`Mesh`: this rank's place in the layout and the process groups it talks through.

Groups are made once at start, in the same order on every rank. Forward and backward traffic of a
pipeline have a group each: two directed channels that never wait for each other (DESIGN §7).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from evenload.errors import ConfigError
from evenload.types.layout import ParallelLayout


@dataclass(frozen=True, eq=False, kw_only=True)
class Mesh:
    """One rank's view.

    Args:
        control: all ranks, on the CPU (clocks, norms, metrics).
        planning: all ranks, on the CPU, used by the thread that prepares coming steps.
        data: ranks that hold the same stage; gradients are summed here.
        forward, backward: ranks of the same pipeline, one group per traffic direction.
        tie: first and last stage of the pipeline (tied embeddings); None elsewhere or when pp = 1.
    """

    layout: ParallelLayout
    rank: int
    pp_rank: int
    dp_rank: int
    device: torch.device
    control: dist.ProcessGroup
    planning: dist.ProcessGroup
    data: dist.ProcessGroup
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    tie: dist.ProcessGroup | None

    @property
    def previous(self) -> int | None:
        """Global rank of the stage before, None on the first."""
        return self._neighbour(-1)

    @property
    def next(self) -> int | None:
        """Global rank of the stage after, None on the last."""
        return self._neighbour(1)

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the head."""
        return self.pp_rank == self.layout.pp - 1

    def _neighbour(self, step: int) -> int | None:
        pp_rank = self.pp_rank + step
        if not 0 <= pp_rank < self.layout.pp:
            return None
        return self.layout.global_rank(pp_rank=pp_rank, dp_rank=self.dp_rank)


def create_mesh(layout: ParallelLayout, device: torch.device, timeout_s: float) -> Mesh:
    """Make the groups of a layout. Collective: every process of the default group calls it.

    Args:
        timeout_s: how long a rank waits for another before it gives up with an error.

    Raises:
        ConfigError: the number of processes does not fit, or a dimension is not available yet.
    """
    world_size = dist.get_world_size()
    if layout.cp > 1 or layout.tp > 1 or layout.num_stages != layout.pp:
        raise ConfigError(
            f"layout {layout.describe()}: the runtime runs dp and pp in this version; cp, tp and virtual stages "
            "can be planned and simulated, not trained"
        )
    if world_size != layout.world_size:
        raise ConfigError(
            f"layout {layout.describe()} needs {layout.world_size} processes, {world_size} are running; "
            f"start with --nproc {layout.world_size} (or torchrun) or change parallel.dp / parallel.pp"
        )
    timeout = timedelta(seconds=timeout_s)
    rank = dist.get_rank()
    pp_rank, dp_rank = divmod(rank, layout.dp)

    def group(members: list[int], backend: str | None = None) -> dist.ProcessGroup:
        return dist.new_group(members, timeout=timeout, backend=backend)  # type: ignore[return-value]

    control, planning = (group(list(range(world_size)), backend="gloo") for _ in range(2))
    data = [group([layout.global_rank(pp_rank=p, dp_rank=d) for d in range(layout.dp)]) for p in range(layout.pp)]
    pipelines = []
    for d in range(layout.dp):
        members = [layout.global_rank(pp_rank=p, dp_rank=d) for p in range(layout.pp)]
        ends = group([members[0], members[-1]]) if layout.pp > 1 else None
        pipelines.append((group(members), group(members), ends))
    forward, backward, tie = pipelines[dp_rank]
    return Mesh(
        layout=layout,
        rank=rank,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        device=device,
        control=control,
        planning=planning,
        data=data[pp_rank],
        forward=forward,
        backward=backward,
        tie=tie if pp_rank in (0, layout.pp - 1) else None,
    )
