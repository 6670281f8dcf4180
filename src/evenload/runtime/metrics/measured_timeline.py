"""Measured `Timeline`: every rank's trace of a step, gathered on rank 0.

Ranks agree on time zero by a barrier at the step's start; each rank's times count from its own exit of
that barrier, so clocks need not be synchronised (the error is the barrier's skew, microseconds on one
machine, about one network latency across nodes).

Context ranks run the same packs together; the timeline shows the one with the most seconds in packs and, after each
action, the memory of the fullest.
"""

from dataclasses import replace

import numpy as np
import torch.distributed as dist

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.executor import RankTrace
from evenload.types.timeline import Timeline

_Row = tuple[int, int, float, int, RankTrace]
"""(dp_rank, pp_rank, zero_s, static_bytes, trace) of one rank."""


def gather_timeline(
    trace: RankTrace, *, zero_s: float, step_time_s: float, static_bytes: int, mesh: Mesh
) -> Timeline | None:
    """All ranks' traces as one timeline on rank 0, None elsewhere. Collective over the control group.

    Args:
        zero_s: this rank's clock at the step's start.
        static_bytes: weights, gradients and optimizer state of this rank.
    """
    mine = (mesh.dp_rank, mesh.pp_rank, zero_s, static_bytes, trace)
    everyone: list[_Row | None] = [None] * mesh.layout.world_size
    dist.gather_object(mine, everyone if mesh.rank == 0 else None, dst=0, group=mesh.control)
    if mesh.rank != 0:
        return None
    rows = _one_of_each_place([row for row in everyone if row is not None])
    sizes = [len(row[4].start_s) for row in rows]

    def per_task(values: list[int], dtype) -> np.ndarray:
        return np.repeat(np.array(values, dtype=dtype), sizes)

    def joined(parts: list[np.ndarray], dtype) -> np.ndarray:
        return np.concatenate(parts).astype(dtype)

    ends = [row[4].end_s - row[2] for row in rows]
    return Timeline(
        dp_rank=per_task([row[0] for row in rows], np.int32),
        rank=per_task([row[1] for row in rows], np.int32),
        stage=joined([row[4].stage for row in rows], np.int32),
        kind=joined([row[4].kind for row in rows], np.uint8),
        pack=joined([row[4].pack for row in rows], np.int32),
        start_s=joined([row[4].start_s - row[2] for row in rows], np.float64),
        end_s=joined(ends, np.float64),
        step_time_s=step_time_s,
        memory_dp_rank=per_task([row[0] for row in rows], np.int32),
        memory_rank=per_task([row[1] for row in rows], np.int32),
        memory_time_s=joined(ends, np.float64),
        memory_bytes=joined([row[4].memory_bytes + row[3] for row in rows], np.int64),
    )


def _one_of_each_place(rows: list[_Row]) -> list[_Row]:
    places: dict[tuple[int, int], list[_Row]] = {}
    for row in rows:
        places.setdefault((row[0], row[1]), []).append(row)
    found = []
    for members in places.values():
        busiest = max(members, key=lambda row: float((row[4].end_s - row[4].start_s).sum()))
        most = np.maximum.reduce([row[4].memory_bytes + row[3] for row in members]) - busiest[3]
        found.append((*busiest[:4], replace(busiest[4], memory_bytes=most)))
    return found
