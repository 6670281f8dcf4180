"""Seconds of every pack of a `Timeline`, and how evenly they are spread.

A pipeline runs at the pace of its slowest pack, so a pack counts with its slowest stage; where the
schedule splits a backward pack (I + W) its parts on a stage are added. Imbalance is the slowest pack over
the mean pack of the same replica (replicas may cut into different numbers of packs), of the worst replica;
1.0 is perfect. Planner, `metrics.jsonl` and reports all mean this; only the planner knows which packs a group of
replicas shares (DP-Merge) and counts those apart. Price: O(n log n) in tasks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenload.types.micropack import Direction
from evenload.types.timeline import KINDS, Timeline


class PackSeconds(NamedTuple):
    """Packs of one direction, by ascending (dp rank, pack).

    Args:
        dp_rank, pack: int64[num_packs].
        seconds: float64[num_packs], on the pack's slowest stage.
    """

    dp_rank: NDArray[np.int64]
    pack: NDArray[np.int64]
    seconds: NDArray[np.float64]

    def imbalance(self) -> float:
        """Slowest over mean pack of a replica, of the worst replica; NaN without packs or without time."""
        worst = float("nan")
        for rank in np.unique(self.dp_rank):
            seconds = self.seconds[self.dp_rank == rank]
            if seconds.sum() > 0:
                worst = float(np.fmax(worst, seconds.max() / seconds.mean()))
        return worst


def pack_times(timeline: Timeline, direction: Direction) -> PackSeconds:
    """Seconds of the packs of one direction over all replicas."""
    # All kinds but F belong to backward packs.
    chosen = (timeline.kind == KINDS.index("F")) == (direction == "forward")
    seconds = (timeline.end_s - timeline.start_s)[chosen]
    keys = np.stack([timeline.dp_rank[chosen], timeline.pack[chosen], timeline.stage[chosen]]).astype(np.int64)
    stages, of_stage = np.unique(keys, axis=1, return_inverse=True)
    stage_seconds = np.bincount(of_stage.ravel(), weights=seconds, minlength=stages.shape[1])
    packs, of_pack = np.unique(stages[:2], axis=1, return_inverse=True)
    slowest = np.zeros(packs.shape[1])
    np.maximum.at(slowest, of_pack.ravel(), stage_seconds)
    return PackSeconds(dp_rank=packs[0], pack=packs[1], seconds=slowest)


def replica_ends(timeline: Timeline) -> dict[int, float]:
    """Seconds at which each replica's last task ends, by dp rank."""
    ranks = np.unique(timeline.dp_rank)
    return {int(rank): float(timeline.end_s[timeline.dp_rank == rank].max()) for rank in ranks}


def replica_imbalance(timeline: Timeline) -> float:
    """Latest over mean end of the replicas' pipelines; NaN without tasks."""
    ends = list(replica_ends(timeline).values())
    return max(ends) / (sum(ends) / len(ends)) if ends else float("nan")
