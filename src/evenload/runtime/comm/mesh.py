"""`Mesh`: this rank's place in a layout and its process groups; `Meshes`: those of all layouts of a run.

Groups are made once at start, for all layouts, in the same order on every rank. Every directed channel between two
virtual stages on different ranks has a group of its own, so no channel waits for another (docs/architecture.md, "Why
nothing deadlocks"); with `channels="fifo"` all channels between two ranks share one. Price on gloo: 1.3 to 1.6 ms a
group. Ranks beyond a layout are idle in it.

On NCCL a channel's kernels hold processors while they wait for the other end, so groups of channels get few of them,
and a stream that comes before computation. NCCL makes a communicator at a group's first transfer, which blocks until
the other rank comes; so every group moves one element at start (`warm_up`), in one total order.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from evenload.errors import ConfigError, InvalidPlanError
from evenload.runtime.comm.collectives import ContextGroup, create_context_groups, rank_grid
from evenload.runtime.comm.tensor_group import TensorGroup
from evenload.runtime.comm.watch import RankWatch
from evenload.types.document import ReplicaBlock
from evenload.types.layout import Channel, ChannelMode, ParallelLayout, channel_of
from evenload.types.text import counted

Told = TypeVar("Told")

CHANNEL_CTAS = 4
"""Processors of a GPU that one transfer of a channel takes (an H100 has 132). Not measured yet."""

_Key = tuple[tuple[int, ...], bool]
"""Ranks, and whether a group of theirs has the options of channels."""


class GroupPool:
    """Makes groups and finds them again by their ranks. Every rank makes the same calls in the same order."""

    def __init__(self, backend: str, timeout: timedelta) -> None:
        self._backend, self._timeout = backend, timeout
        self._made: dict[_Key, list[dist.ProcessGroup]] = {}
        self._taken: Counter[_Key] = Counter()
        self.num_groups = 0
        """Groups made so far, on all ranks together."""

    def begin_layout(self) -> None:
        """Allow the next layout to take what earlier ones took."""
        self._taken.clear()

    def take(self, ranks: list[int], *, is_channel: bool = False) -> dist.ProcessGroup:
        """Return a group of these ranks, ascending, that the layout at hand has not taken yet."""
        # Only where channels have options of their own are their groups no good for others.
        key = tuple(ranks), is_channel and self._backend == "nccl"
        groups = self._made.setdefault(key, [])
        if self._taken[key] == len(groups):
            groups.append(self.make(ranks, options=channel_options(self._timeout) if key[1] else None))
        self._taken[key] += 1
        return groups[self._taken[key] - 1]

    def own(self, rank: int, groups: Iterable[list[int]]) -> dist.ProcessGroup | None:
        """Take every one of these groups; return the one that a rank is in."""
        taken = [(ranks, self.take(ranks)) for ranks in groups]
        return next((group for ranks, group in taken if rank in ranks), None)

    def make(
        self, ranks: list[int], backend: str | None = None, timeout: timedelta | None = None, options: Any = None
    ) -> dist.ProcessGroup:
        """Make a group that no layout takes; `options` are those of its backend."""
        self.num_groups += 1
        timeout, backend = timeout or self._timeout, backend or self._backend
        return dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=options)  # type: ignore[return-value]


def channel_options(timeout: timedelta) -> Any:
    """Return options of an NCCL group that carries channels: few processors, a stream of high priority."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timeout  # else torch warns that this and `new_group`'s are not the same
    options.config.min_ctas, options.config.max_ctas = 1, CHANNEL_CTAS
    return options


@dataclass(frozen=True, eq=False, kw_only=True)
class Mesh:
    """One rank's view of one layout.

    Args:
        pp_rank, dp_rank, cp_rank, tp_rank: this rank's place; an idle rank has -1 of the first two.
        control, planning, saving: all ranks, on the CPU; the latter two for the threads that prepare steps and write
            checkpoints.
        moving: all ranks, on their devices, for what moves between two layouts; None = the layout never changes.
        data: ranks that hold the same weights, all context ranks of all replicas. Of an idle rank itself alone.
        channel_groups: by channel of this rank, hidden states first, a group of both ends, on different ranks.
        context: by block of replicas, this rank's groups that may share documents.
        tensor: ranks that hold the other parts of the same matrices; None without tensor parallelism.
        tie: all ranks of the first and the last stage (tied embeddings); None elsewhere, or where one rank holds both.
        watch: every wait for other ranks runs inside `watch.waiting`.
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
    moving: dist.ProcessGroup | None
    data: dist.ProcessGroup
    channel_groups: Mapping[Channel, dist.ProcessGroup]
    channels: ChannelMode
    context: Mapping[ReplicaBlock, ContextGroup]
    tensor: TensorGroup | None
    tie: dist.ProcessGroup | None
    watch: RankWatch
    ranks_per_machine: int

    @property
    def is_idle(self) -> bool:
        """Whether the layout, of fewer ranks than the run, has no place for this one."""
        return self.pp_rank < 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the run; a layout may have fewer."""
        return dist.get_world_size(self.control)

    @property
    def place(self) -> str:
        """This rank's name in errors, such as "rank 3 (dp 1, stage 1)"."""
        if self.is_idle:
            return f"rank {self.rank} (idle)"
        sizes = (("dp", self.dp_rank, 0), ("cp", self.cp_rank, self.layout.cp), ("tp", self.tp_rank, self.layout.tp))
        named = [f"{axis} {place}" for axis, place, size in sizes if axis == "dp" or size > 1]
        return f"rank {self.rank} ({', '.join(named)}, stage {self.pipeline_stage})"

    @property
    def pipeline_stage(self) -> int:
        """This rank's place in the pipeline, which several ranks may share; -1 where it is idle."""
        return self.layout.stages_of_rank(self.pp_rank)[0] if not self.is_idle else -1

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank in self.layout.ranks_of_stage(self.layout.num_stages - 1)

    @property
    def data_size(self) -> int:
        """Number of ranks of `data`: each owns a shard of gradients and optimizer state."""
        return 1 if self.is_idle else self.layout.data_sizes[self.pp_rank]

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(pp_rank=self.pp_rank, dp_rank=self.dp_rank, cp_rank=self.cp_rank)

    def rank_of_stage(self, stage: int, pack: int = 0) -> int:
        """Return the global rank of a stage of this rank's pipeline; of several, that which runs a pack."""
        return self._global_rank(self.layout.rank_of_pack(stage, pack))

    def channel(self, kind: str, stage: int, pack: int) -> Channel:
        """Return the channel on which this rank sends or receives a pack's tensor for a stage."""
        return channel_of(self.layout, self.pp_rank, kind, stage, pack)

    def receives_on(self, channel: Channel) -> bool:
        return channel[1] in self.layout.stages_of_rank(self.pp_rank)

    def other_end(self, channel: Channel) -> int:
        """Return the global rank of the other end of one of this rank's channels."""
        if len(channel) == 3:
            return self._global_rank(channel[2])
        kind, stage = channel
        if self.receives_on(channel):
            stage += -1 if kind == "F" else 1
        return self.rank_of_stage(stage)

    def _global_rank(self, pp_rank: int) -> int:
        own = {"dp_rank": self.dp_rank, "cp_rank": self.cp_rank, "tp_rank": self.tp_rank}
        return self.layout.global_rank(pp_rank=pp_rank, **own)


class Meshes:
    """One rank's meshes of all layouts that a run may take; the first is that in which the run starts. Where it may
    take several, it may also take them with other layers in their stages, which need no other groups."""

    def __init__(self, meshes: Sequence[Mesh], num_groups: int = 0) -> None:
        self.start, self.num_groups = meshes[0], num_groups
        self._by_layout = {mesh.layout.arrangement: mesh for mesh in meshes}
        self._of_shape = {mesh.layout.shape: mesh for mesh in meshes} if len(meshes) > 1 else {}
        self._with_other_layers: dict[ParallelLayout, Mesh] = {}

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        return tuple(self._by_layout)

    @property
    def sum_gradients(self) -> bool:
        """Whether several ranks hold the same weights in some layout."""
        return any(max(layout.data_sizes) > 1 for layout in self._by_layout)

    def of(self, layout: ParallelLayout) -> Mesh:
        """Return the mesh of a layout, the same object at each call, whatever its generation; `InvalidPlanError` where
        the run has no groups for it."""
        arrangement = layout.arrangement
        if (mesh := self._by_layout.get(arrangement) or self._with_other_layers.get(arrangement)) is not None:
            return mesh
        if (like := self._of_shape.get(arrangement.shape)) is None:
            raise InvalidPlanError(
                f"a plan is made for {layout.describe()}, this run may take "
                f"{', '.join(one.describe() for one in self._by_layout)} (parallel.*, plan.layouts)"
            )
        self._with_other_layers[arrangement] = replace(like, layout=arrangement)
        return self._with_other_layers[arrangement]


def create_meshes(
    layouts: Sequence[ParallelLayout],
    device: torch.device,
    timeout_s: float,
    saving_timeout_s: float | None = None,
    signs: dist.Store | None = None,  # type: ignore[reportPrivateImportUsage]
    channels: ChannelMode = "directed",
    ranks_per_machine: int | None = None,
    backend: str | None = None,
) -> Meshes:
    """Make the groups of all layouts of a run. Collective. `ConfigError`: the number of processes does not fit.

    Args:
        layouts: the run starts in the first, which has a place for every process; others may leave ranks idle.
        timeout_s, saving_timeout_s: how long a rank waits for another, in general and while a checkpoint is written.
        signs: a store of all ranks in which they show that they live; used by nothing else.
        ranks_per_machine: None = all ranks are on this machine.
        backend: of tensors on the device; None = NCCL for GPUs, gloo for CPUs.
    """
    start, world_size = layouts[0], dist.get_world_size()
    if world_size != start.world_size:
        raise ConfigError(
            f"layout {start.describe()} needs {counted(start.world_size, 'process')}, {world_size} are running; start "
            f"with --nproc {start.world_size} (or torchrun) or change parallel.dp / cp / pp / tp"
        )
    # Of tensors on the device; what only the host sees (control, planning, saving) goes through gloo in any case.
    pool = GroupPool(backend or ("nccl" if device.type == "cuda" else "gloo"), timedelta(seconds=timeout_s))
    everyone = list(range(world_size))
    control, planning = (pool.make(everyone, "gloo") for _ in range(2))
    rank = dist.get_rank()
    shared: dict[str, Any] = {
        "rank": rank,
        "device": device,
        "control": control,
        "planning": planning,
        "saving": pool.make(everyone, "gloo", timedelta(seconds=saving_timeout_s or timeout_s)),
        "moving": pool.make(everyone) if len(layouts) > 1 else None,
        "channels": channels,
        "watch": RankWatch(rank, f"rank {rank}", world_size, signs),
        "ranks_per_machine": ranks_per_machine or world_size,
    }
    meshes = []
    for layout in layouts:
        assert layout.world_size <= world_size, "`layouts_of` refuses larger ones than the first"
        pool.begin_layout()
        meshes.append(_mesh_of(layout.arrangement, shared, pool))
    meshes[0].watch.name = meshes[0].place
    return Meshes(meshes, pool.num_groups)


def _mesh_of(layout: ParallelLayout, shared: dict[str, Any], pool: GroupPool) -> Mesh:
    """Make one layout's mesh; `shared` are the fields that all have in common. Collective."""
    rank, watch, grid = shared["rank"], shared["watch"], rank_grid(layout)
    is_idle = rank >= layout.world_size
    pp_rank, dp_rank, cp_rank, tp_rank = (
        (-1, -1, 0, rank % layout.tp) if is_idle else (int(place) for place in np.unravel_index(rank, grid.shape))
    )
    # Pipeline ranks with the same layers are neighbours, and replicas of each other; an idle rank has nobody.
    same = [list(ranks) for _, ranks in itertools.groupby(range(grid.shape[0]), layout.leading_ranks.__getitem__)]
    replicas = [grid[ranks, :, :, t].ravel().tolist() for ranks in same for t in range(layout.tp)]
    data = pool.own(rank, [*replicas, *([idle] for idle in range(layout.world_size, dist.get_world_size()))])
    assert data is not None
    parts = pool.own(rank, grid.reshape(-1, layout.tp).tolist() if layout.tp > 1 else ())
    channel_groups, tie = _stage_groups(layout, rank, pool, shared["channels"])
    return Mesh(
        **shared,
        layout=layout,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
        tp_rank=tp_rank,
        data=data,
        channel_groups=channel_groups,
        context=create_context_groups(layout, rank, pool.take, watch),
        tensor=None if parts is None else TensorGroup(parts, watch),
        tie=tie,
    )


def _stage_groups(
    layout: ParallelLayout, rank: int, pool: GroupPool, channels: ChannelMode
) -> tuple[dict[Channel, dist.ProcessGroup], dist.ProcessGroup | None]:
    forward: dict[Channel, dist.ProcessGroup] = {}
    backward: dict[Channel, dist.ProcessGroup] = {}
    tie = None
    grid = rank_grid(layout)
    for d, c, t in np.ndindex(*grid.shape[1:]):
        holders: list[int] = grid[:, d, c, t].tolist()
        shared: dict[frozenset[int], dist.ProcessGroup] = {}
        for stage in range(layout.num_stages - 1):
            for ends in layout.linked_ranks(stage):
                pair = holders[ends[0]], holders[ends[1]]
                if pair[0] == pair[1]:
                    continue
                if channels == "directed":
                    groups = pool.take(sorted(pair), is_channel=True), pool.take(sorted(pair), is_channel=True)
                else:
                    if frozenset(pair) not in shared:
                        shared[frozenset(pair)] = pool.take(sorted(pair), is_channel=True)
                    groups = (shared[frozenset(pair)],) * 2
                if rank not in pair:
                    continue
                to: Channel = ("F", stage + 1)
                back: Channel = ("B", stage)
                if layout.has_replicated_stages:
                    other = ends[pair.index(rank) - 1]
                    to, back = ("F", stage + 1, other), ("B", stage, other)
                forward[to], backward[back] = groups
        edges = (layout.ranks_of_stage(0), layout.ranks_of_stage(layout.num_stages - 1))
        members = sorted({holders[pp_rank] for pp_rank in itertools.chain(*edges)})
        if edges[0] != edges[1]:
            both = pool.take(members)
            tie = both if rank in members else tie
    return forward | backward, tie


def warm_up(meshes: Meshes) -> int:
    """Use every group of this rank once; return how many. Collective; `RankLostError`: a rank does not come."""
    used: set[dist.ProcessGroup] = set()
    for mesh in map(meshes.of, meshes.layouts):
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
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
    return len(used)


def _warm_channels(mesh: Mesh, one: torch.Tensor, used: set[dist.ProcessGroup]) -> None:
    """Use those that are not in `used` yet, and add them."""
    for stage in range(mesh.layout.num_stages - 1):
        # Of both directions between `stage` and the next; to several ranks in their order.
        for wanted in (("F", stage + 1), ("B", stage)):
            for channel, group in mesh.channel_groups.items():
                if channel[:2] != wanted or group in used:
                    continue
                if mesh.receives_on(channel):
                    dist.recv(one.clone(), mesh.other_end(channel), group=group)
                else:
                    dist.send(one, mesh.other_end(channel), group=group)
                used.add(group)


def gather_from_all(mine: Told, mesh: Mesh, what: str = "a report") -> list[Told]:
    """Return every rank's object, in the order of ranks; `what` is for messages. Collective over the control group."""
    everyone = [mine] * mesh.num_ranks
    with mesh.watch.waiting(what):
        dist.all_gather_object(everyone, mine, group=mesh.control)
    return everyone


def share_of_first(mine: Told, mesh: Mesh, what: str = "a report") -> Told:
    """Return rank 0's object on every rank; `what` is for messages. Collective over the control group."""
    shared = [mine]
    with mesh.watch.waiting(what):
        dist.broadcast_object_list(shared, src=0, group=mesh.control)
    return shared[0]


def most_of_ranks(value: float, mesh: Mesh) -> float:
    """Return the largest value of any rank; whole numbers to 2^53 stay exact. Collective over the control group."""
    reduced = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=mesh.control)
    return float(reduced)
