"""Count main memory: offloaded activations of a node.

A rank holds a forward's offloaded rows from its start until the backward with a chunk's first token ends, as on the
device. The memory is page-locked and kept within a run (`runtime/replay/host_copies.py`), so a node needs the sum of
its ranks' peaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.cost.layer_counts import OFFLOAD, activation_bytes_per_token, stage_kinds
from evenload.cost.memory import ReplicaPacks, count_tokens
from evenload.types.cluster import ClusterSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.pipeline import ActionColumns
from evenload.types.timeline import KINDS

OFFLOAD_SHARE = 0.85  # Of a node's memory, for offloaded activations


@dataclass(frozen=True)
class HostMemory:
    """Hold what a node of so many devices offers to offloaded activations; `limit_bytes` None = not limited."""

    devices_per_node: int
    limit_bytes: int | None


Unlimited = Literal["unlimited"]
"""In place of a `HostMemory` where nothing limits offloaded activations, or nothing is offloaded: a name, so that no
limit is forgotten."""


def host_memory(cluster: ClusterSpec) -> HostMemory:
    """Return what nodes of a cluster offer to offloaded activations."""
    return host_memory_of_node(cluster.devices_per_node, cluster.host_memory_bytes)


def host_memory_of_node(devices_per_node: int, memory_bytes: int | None) -> HostMemory:
    """Return what a node with so much memory offers; None = not known, so not limited."""
    return HostMemory(devices_per_node, None if memory_bytes is None else int(OFFLOAD_SHARE * memory_bytes))


class PacksInHostMemory(NamedTuple):
    """Hold what the packs of one replica offload when a forward starts, and give back when a backward ends, or its I
    where it is split; int64[num_packs, P] each."""

    kept: NDArray[np.int64]
    freed: NDArray[np.int64]

    def peaks(self, actions: ActionColumns) -> NDArray[np.int64]:
        """Return the most that every pipeline rank holds at any time where packs run in this order; int64[R]."""
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


def host_bytes_of_packs(model: ModelSpec, layout: ParallelLayout, packs: ReplicaPacks) -> PacksInHostMemory | None:
    """Count the offloaded bytes of packs; None where no document is offloaded."""
    if packs.policy is None or not (packs.policy == OFFLOAD).any():
        return None
    counts = count_tokens(packs)
    rate = stage_kinds(model, layout) @ activation_bytes_per_token(model, "replay", layout.tp)
    kept, freed = (np.outer(tokens[:, OFFLOAD], rate) for tokens in (counts.kept_chunks, counts.freed_chunks))
    return PacksInHostMemory(kept, freed)


def peak_host_bytes(
    model: ModelSpec, layout: ParallelLayout, packs: ReplicaPacks, actions: ActionColumns
) -> NDArray[np.int64]:
    """Return the most that every pipeline rank of one replica has offloaded at any time; int64[R]."""
    held = host_bytes_of_packs(model, layout, packs)
    return np.zeros(actions.num_ranks, np.int64) if held is None else held.peaks(actions)


def fullest_node_bytes(layout: ParallelLayout, peaks: Sequence[NDArray[np.int64]], devices_per_node: int) -> int:
    """Return the bytes of the node whose ranks hold most; `peaks` int64[R] of every replica, of one of its context and
    tensor ranks, which hold alike."""
    of_devices = np.repeat(np.stack(peaks, axis=1).ravel(), layout.cp * layout.tp)
    padded = np.zeros(-(-len(of_devices) // devices_per_node) * devices_per_node, np.int64)
    padded[: len(of_devices)] = of_devices
    return int(padded.reshape(-1, devices_per_node).sum(axis=1).max())
