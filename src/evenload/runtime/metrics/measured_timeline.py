"""Measured `Timeline`: every rank's trace of a step, gathered on rank 0.

Ranks agree on time zero by a barrier at the step's start; each rank's times count from its own exit of
that barrier, so clocks need not be synchronised (the error is the barrier's skew, microseconds on one
machine, about one network latency across nodes).

Context ranks run the same packs together; the timeline shows the one with the most seconds in packs and, after each
action, the memory of the fullest.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.executor import RankTrace
from evenload.types.timeline import Timeline


def gather_timeline(
    trace: RankTrace, *, zero_s: float, step_time_s: float, static_bytes: int, mesh: Mesh
) -> Timeline | None:
    """All ranks' traces as one timeline on rank 0, None elsewhere. Collective over the control group.

    Args:
        zero_s: this rank's clock at the step's start.
        static_bytes: weights, gradients and optimizer state of this rank.
    """
    mine = replace(
        trace,
        start_s=trace.start_s - zero_s,
        end_s=trace.end_s - zero_s,
        memory_bytes=trace.memory_bytes + static_bytes,
    )
    told = (mesh.dp_rank, mesh.pp_rank, mine)
    everyone = [told] * mesh.layout.world_size
    dist.gather_object(told, everyone if mesh.rank == 0 else None, dst=0, group=mesh.control)
    if mesh.rank != 0:
        return None
    places: dict[tuple[int, int], list[RankTrace]] = defaultdict(list)
    for dp_rank, pp_rank, one in everyone:
        places[dp_rank, pp_rank].append(one)
    parts = [_columns(*place, traces) for place, traces in places.items()]
    joined: dict[str, Any] = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Timeline(**joined, step_time_s=step_time_s)


def _columns(dp_rank: int, pp_rank: int, traces: list[RankTrace]) -> dict[str, np.ndarray]:
    busiest = max(traces, key=lambda trace: float((trace.end_s - trace.start_s).sum()))
    place = {
        "dp_rank": np.full(len(busiest.kind), dp_rank, np.int32),
        "rank": np.full(len(busiest.kind), pp_rank, np.int32),
    }
    tasks = {name: getattr(busiest, name) for name in ("stage", "kind", "pack", "start_s", "end_s")}
    memory = {f"memory_{name}": column for name, column in place.items()} | {
        "memory_time_s": busiest.end_s,
        "memory_bytes": np.maximum.reduce([trace.memory_bytes for trace in traces]),
    }
    return place | tasks | memory
