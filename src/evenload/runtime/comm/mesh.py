"""`Mesh`: this rank's place in the layout and the process groups it talks through.

Groups are made once at start, in the same order on every rank. Every directed channel between two virtual stages on
different ranks has a group of its own, so no channel waits for another (docs/architecture.md, "Why nothing
deadlocks"), also where NCCL would run all traffic of a pair of ranks in one order: with virtual stages the same two
ranks are neighbours several times, in both directions. With `channels="fifo"` all channels between two ranks share one
group.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from evenload.errors import ConfigError
from evenload.runtime.comm.cp_groups import ContextGroup, create_context_groups, rank_grid
from evenload.runtime.comm.tensor_group import TensorGroup
from evenload.runtime.comm.watch import RankWatch
from evenload.types.layout import ParallelLayout
from evenload.types.replica_block import ReplicaBlock
from evenload.types.transfers import ChannelMode


@dataclass(frozen=True, eq=False, kw_only=True)
class Mesh:
    """One rank's view.

    Args:
        control: all ranks, on the CPU (clocks, norms, metrics).
        planning: all ranks, on the CPU, used by the thread that prepares coming steps.
        saving: all ranks, on the CPU, used by the thread that writes checkpoints.
        data: ranks that hold the same weights, all context ranks of all replicas; gradients are summed here.
        forward, backward: by virtual stage, the channel on which it receives hidden states or gradients: a group of
            the sending and the receiving rank. Only channels of this rank; none where one rank holds both stages.
        channels: whether every channel has a group of its own ("directed") or all channels of two ranks share one
            ("fifo").
        context: by block of replicas, this rank's groups that may share documents (`cp_groups`).
        tensor: ranks that hold the other parts of the same matrices; None without tensor parallelism.
        tie: the ranks of the first and the last stage (tied embeddings); None elsewhere, or where one rank holds both.
        watch: every wait for other ranks runs inside `watch.waiting`, which names them when they fail.
        ranks_per_machine: neighbours in rank order that share a machine.
    """

    layout: ParallelLayout
    rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int
    tp_rank: int
    device: torch.device
    control: dist.ProcessGroup
    planning: dist.ProcessGroup
    saving: dist.ProcessGroup
    data: dist.ProcessGroup
    forward: Mapping[int, dist.ProcessGroup]
    backward: Mapping[int, dist.ProcessGroup]
    channels: ChannelMode
    context: Mapping[ReplicaBlock, ContextGroup]
    tensor: TensorGroup | None
    tie: dist.ProcessGroup | None
    watch: RankWatch
    ranks_per_machine: int

    @property
    def is_last_stage(self) -> bool:
        """This rank holds the head."""
        return self.pp_rank == self.layout.stage_to_rank[-1]

    @property
    def data_size(self) -> int:
        """Ranks of `data`: each owns a shard of gradients and optimizer state."""
        return self.layout.dp * self.layout.cp

    @property
    def data_rank(self) -> int:
        """This rank's place in `data`."""
        return self.dp_rank * self.layout.cp + self.cp_rank

    def rank_of_stage(self, stage: int) -> int:
        """Global rank of a virtual stage of this rank's pipeline."""
        pp_rank = self.layout.stage_to_rank[stage]
        return self.layout.global_rank(
            pp_rank=pp_rank, dp_rank=self.dp_rank, cp_rank=self.cp_rank, tp_rank=self.tp_rank
        )


def create_mesh(
    layout: ParallelLayout,
    device: torch.device,
    timeout_s: float,
    saving_timeout_s: float | None = None,
    signs: dist.Store | None = None,  # type: ignore[reportPrivateImportUsage]
    channels: ChannelMode = "directed",
    ranks_per_machine: int | None = None,
) -> Mesh:
    """Make the groups of a layout. Collective: every process of the default group calls it.

    Args:
        timeout_s: how long a rank waits for another before it gives up with an error.
        saving_timeout_s: the same while a checkpoint is written, when a rank may wait for a slow disk of another;
            None = `timeout_s`.
        signs: a store of all ranks in which they show that they live; used by nothing else.
        ranks_per_machine: None = all ranks are on this machine.

    Raises:
        ConfigError: the number of processes does not fit.
    """
    world_size = dist.get_world_size()
    if world_size != layout.world_size:
        raise ConfigError(
            f"layout {layout.describe()} needs {layout.world_size} processes, {world_size} are running; "
            f"start with --nproc {layout.world_size} (or torchrun) or change parallel.dp / cp / pp / tp"
        )
    timeout = timedelta(seconds=timeout_s)
    # Of tensors on the device; what only the host sees (control, planning, saving) goes through gloo in any case.
    device_backend = "nccl" if device.type == "cuda" else "gloo"
    rank = dist.get_rank()
    grid = rank_grid(layout)
    pp_rank, dp_rank, cp_rank, tp_rank = (int(place) for place in np.unravel_index(rank, grid.shape))

    def group(members: list[int], backend: str = device_backend, timeout: timedelta = timeout) -> dist.ProcessGroup:
        return dist.new_group(members, timeout=timeout, backend=backend)  # type: ignore[return-value]

    everyone = list(range(world_size))
    control, planning = (group(everyone, backend="gloo") for _ in range(2))
    saving = group(everyone, backend="gloo", timeout=timedelta(seconds=saving_timeout_s or timeout_s))

    data = {(p, t): group(grid[p, :, :, t].ravel().tolist()) for p, t in np.ndindex(layout.pp, layout.tp)}
    places = [
        f"dp {dp_rank}",
        *([f"cp {cp_rank}"] if layout.cp > 1 else []),
        *([f"tp {tp_rank}"] if layout.tp > 1 else []),
    ]
    watch = RankWatch(rank, f"rank {rank} ({', '.join(places)}, stage {pp_rank})", world_size, signs)
    tensor = None
    for place in np.ndindex(*grid.shape[:3]) if layout.tp > 1 else ():
        made = group(grid[place].tolist())
        tensor = TensorGroup(made, watch) if place == (pp_rank, dp_rank, cp_rank) else tensor
    forward, backward, tie = _stage_groups(layout, rank, group, channels)
    return Mesh(
        layout=layout,
        rank=rank,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        tp_rank=tp_rank,
        device=device,
        control=control,
        planning=planning,
        saving=saving,
        data=data[pp_rank, tp_rank],
        forward=forward,
        backward=backward,
        channels=channels,
        context=create_context_groups(layout, rank, group, watch),
        tensor=tensor,
        tie=tie,
        watch=watch,
        ranks_per_machine=ranks_per_machine or world_size,
    )


def _stage_groups(
    layout: ParallelLayout, rank: int, group: Callable[[list[int]], dist.ProcessGroup], channels: ChannelMode
) -> tuple[dict[int, dist.ProcessGroup], dict[int, dist.ProcessGroup], dist.ProcessGroup | None]:
    """Groups of neighbouring stages: forward by the stage that receives, backward likewise, and of both ends."""
    forward: dict[int, dist.ProcessGroup] = {}
    backward: dict[int, dist.ProcessGroup] = {}
    tie = None
    grid = rank_grid(layout)
    for d, c, t in np.ndindex(*grid.shape[1:]):
        holders: list[int] = grid[layout.stage_to_rank, d, c, t].tolist()
        shared: dict[frozenset[int], dist.ProcessGroup] = {}
        for stage, pair in enumerate(itertools.pairwise(holders)):
            if pair[0] == pair[1]:
                continue
            if channels == "directed":
                groups = group(sorted(pair)), group(sorted(pair))
            else:
                if frozenset(pair) not in shared:
                    shared[frozenset(pair)] = group(sorted(pair))
                groups = (shared[frozenset(pair)],) * 2
            if rank in pair:
                forward[stage + 1], backward[stage] = groups
        if holders[0] != holders[-1]:
            ends = group(sorted((holders[0], holders[-1])))
            tie = ends if rank in (holders[0], holders[-1]) else tie
    return forward, backward, tie
