"""Which rank a loader serves, and how it talks to the others.

| the caller gives | ranks that share a global batch | reading |
|---|---|---|
| nothing, no `torch.distributed` | this one | all of it |
| nothing, `torch.distributed` initialised | all | each its share, tokens exchanged |
| `group` | the group's | each its share, tokens exchanged |
| `rank`, `world_size` | those | each all of it; needs no communication at all |

With `sequence_ranks` so many neighbouring ranks of these share every micro-batch: they are one place.

Ranks that read together get a group of their own with a CPU backend, because a thread uses it while training
communicates. Making it is collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from evenload.data.batches import Alone, Peers
from evenload.errors import ConfigError
from evenload.runtime.comm.torch_peers import TorchPeers
from evenload.types.counted import counted


@dataclass(frozen=True, eq=False, kw_only=True)
class LoaderPlace:
    """A rank's place.

    Args:
        rank, world_size: among the shares of a global batch; ranks of a sequence group have the same.
        peers: those that read together.
        replicas: of every one of `peers`, the place whose packs it wants.
        reads_alone: the others are not spoken to.
        is_first: of all ranks, the one that logs.
    """

    rank: int
    world_size: int
    peers: Peers
    replicas: Sequence[int]
    reads_alone: bool
    is_first: bool


def find_place(
    rank: int | None, world_size: int | None, group: Any, timeout_s: float, sequence_ranks: int = 1
) -> LoaderPlace:
    """This process's place; arguments as in `LoaderOptions`, a `ConfigError` for half of a place, two, or a sequence
    group that is not whole. Collective."""
    if (rank is None) != (world_size is None):
        raise ConfigError(f"rank is {rank} and world_size {world_size}; give both or none")
    if rank is not None and world_size is not None:
        if group is not None:
            raise ConfigError("rank and world_size stand beside group, which says both; leave them out")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank}, must be in 0 .. {world_size - 1}")
        own = rank // sequence_ranks
        return LoaderPlace(
            rank=own,
            world_size=_groups(world_size, sequence_ranks),
            peers=Alone(),
            replicas=(own,),
            reads_alone=True,
            is_first=rank == 0,
        )
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ConfigError("group is given, but torch.distributed is not initialised")
        return LoaderPlace(
            rank=0,
            world_size=_groups(1, sequence_ranks),
            peers=Alone(),
            replicas=(0,),
            reads_alone=True,
            is_first=True,
        )
    ranks = None if group is None else dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks, backend="gloo", timeout=timedelta(seconds=timeout_s), use_local_synchronization=group is not None
    )
    assert isinstance(own, dist.ProcessGroup)
    peers = TorchPeers(own)
    return LoaderPlace(
        rank=peers.rank // sequence_ranks,
        world_size=_groups(peers.size, sequence_ranks),
        peers=peers,
        replicas=[peer // sequence_ranks for peer in range(peers.size)],
        reads_alone=False,
        is_first=peers.rank == 0,
    )


def _groups(ranks: int, sequence_ranks: int) -> int:
    """Sequence groups of so many ranks."""
    if ranks % sequence_ranks:
        raise ConfigError(
            f"sequence_ranks is {sequence_ranks}, which does not divide {counted(ranks, 'rank')}; every rank "
            "belongs to a group of so many"
        )
    return ranks // sequence_ranks
