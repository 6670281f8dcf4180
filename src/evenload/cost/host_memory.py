"""Host memory that offloaded activations take on a node.

What a rank holds there follows its actions: a forward's offloaded rows from its start on (`cost.activation`: all that
`replay` would keep), until the backward that contains a chunk's first token ends, as on the device. The memory is
page-locked and not given back within a run (`runtime/replay/host_arena.py`), so a rank's peak is what it holds, and a
node's need is the sum of the peaks of its ranks, whenever each of them is.

The order of ranks says who shares a node (`types.layout`): devices are numbered by pipeline rank, then replica, then
context and tensor rank, and a node has `devices_per_node` neighbours.

Of a node's memory `OFFLOAD_SHARE` is for this. Of 2 TB it leaves 300 GB: 80 GB for eight processes with CUDA and NCCL
(10 GB each, assumed); the copy that a checkpoint is written from, 14 bytes a parameter over all nodes, which torch's
pinned memory rounds up, about 100 GB of llama-150b on 32 nodes; 1 % of what is offloaded for what the arena holds
beyond it (tests/runtime/test_host_arena.py); 100 GB for the system and its page cache. A
large model on few nodes has a larger copy: there `host_memory_bytes` is to be lowered by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.activation import OFFLOAD, activation_bytes_per_token
from evenload.cost.memory import count_tokens
from evenload.types.cluster import ClusterSpec
from evenload.types.columns import SliceColumns
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import ActionColumns
from evenload.types.timeline import KINDS

OFFLOAD_SHARE = 0.85
"""Of a node's memory, for offloaded activations."""


@dataclass(frozen=True)
class HostMemory:
    """What a node offers to offloaded activations.

    Args:
        devices_per_node: ranks that share it.
        limit_bytes: None = not limited.
    """

    devices_per_node: int
    limit_bytes: int | None

    @property
    def of_device_bytes(self) -> int | None:
        """What each device gets of it where all get as much; None = not limited."""
        return None if self.limit_bytes is None else self.limit_bytes // self.devices_per_node


Unlimited = Literal["unlimited"]
"""Instead of a `HostMemory`, where somebody wants offloaded activations without a limit, or nothing is offloaded; said
by name, so that no limit is forgotten."""


def host_memory(cluster: ClusterSpec) -> HostMemory:
    """Of a cluster's nodes."""
    return host_memory_of_node(cluster.devices_per_node, cluster.host_memory_bytes)


def host_memory_of_node(devices_per_node: int, memory_bytes: int | None) -> HostMemory:
    """Of a node with so much memory; None = not known, so not limited."""
    return HostMemory(devices_per_node, None if memory_bytes is None else int(OFFLOAD_SHARE * memory_bytes))


def peak_host_bytes(
    model: ModelSpec,
    layout: ParallelLayout,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8] | None,
    actions: ActionColumns,
) -> NDArray[np.int64]:
    """The most that every pipeline rank of one replica has offloaded at any time; int64[R].

    Args:
        forward, backward: the replica's packs.
        num_tokens: int64[num_documents] of the replica's documents.
        policy: int8[num_documents], indices into `cost.activation.POLICIES`; None = all replay.
        actions: the order in which ranks run the packs.
    """
    if policy is None or not (policy == OFFLOAD).any():
        return np.zeros(actions.num_ranks, np.int64)
    return host_bytes_of_packs(model, layout, forward, backward, num_tokens, policy).peaks(actions)


class PacksInHostMemory(NamedTuple):
    """What the packs of one replica have offloaded: int64[num_packs, P], from a forward's start, and given back when a
    backward ends, or its I where it is split."""

    kept: NDArray[np.int64]
    freed: NDArray[np.int64]

    def peaks(self, actions: ActionColumns) -> NDArray[np.int64]:
        """The most that every pipeline rank holds at any time where packs run in an order; int64[R]."""
        kept, freed = np.zeros((2, len(actions.kind)), np.int64)
        for kind, into, of_packs in (("F", kept, self.kept), ("B", freed, self.freed), ("I", freed, self.freed)):
            at = np.flatnonzero(actions.kind == KINDS.index(kind))
            into[at] = of_packs[actions.pack[at], actions.stage[at]]
        peaks = np.zeros(actions.num_ranks, np.int64)
        for rank in range(actions.num_ranks):
            own = actions.of_rank(rank)
            running = np.cumsum(kept[own] - freed[own]) + freed[own]
            peaks[rank] = running.max(initial=0)
        return peaks


def host_bytes_of_packs(
    model: ModelSpec,
    layout: ParallelLayout,
    forward: SliceColumns,
    backward: SliceColumns,
    num_tokens: NDArray[np.int64],
    policy: NDArray[np.int8],
) -> PacksInHostMemory:
    """Arguments as `peak_host_bytes`."""
    counts = count_tokens(forward, backward, num_tokens, policy)
    rate = np.array(layout.stage_counts, np.int64) * activation_bytes_per_token(model, "replay", layout.tp)
    kept, freed = (np.outer(tokens[:, OFFLOAD], rate) for tokens in (counts.kept_chunks, counts.freed_chunks))
    return PacksInHostMemory(kept, freed)


def fullest_node_bytes(layout: ParallelLayout, peaks: Sequence[NDArray[np.int64]], devices_per_node: int) -> int:
    """Of the node whose ranks hold most.

    Args:
        peaks: int64[R] of every replica, of one of its context and tensor ranks, which hold alike.
    """
    of_devices = np.repeat(np.stack(peaks, axis=1).ravel(), layout.cp * layout.tp)
    padded = np.zeros(-(-len(of_devices) // devices_per_node) * devices_per_node, np.int64)
    padded[: len(of_devices)] = of_devices
    return int(padded.reshape(-1, devices_per_node).sum(axis=1).max())
