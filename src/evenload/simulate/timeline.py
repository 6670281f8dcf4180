"""A simulation as the `Timeline` that reports draw and measured runs are compared with. O(actions)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenload.simulate.memory_ledger import memory_ledger
from evenload.simulate.simulate import Simulation
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import Timeline


def to_timeline(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation, dp_rank: int, step_time_s: float
) -> Timeline:
    """Tasks in schedule order; memory samples as of `memory_ledger`. The step time is that of all replicas."""
    rank = actions.rank.astype(np.int32)
    held = memory_ledger(tasks, actions)
    times_s = np.stack([simulation.start_s, simulation.end_s], axis=1).ravel()
    return Timeline(
        dp_rank=np.full(len(rank), dp_rank, dtype=np.int32),
        rank=rank,
        stage=actions.stage,
        kind=actions.kind,
        pack=actions.pack,
        start_s=simulation.start_s,
        end_s=simulation.end_s,
        step_time_s=step_time_s,
        memory_dp_rank=np.full(len(held), dp_rank, dtype=np.int32),
        memory_rank=np.repeat(np.arange(actions.num_ranks, dtype=np.int32), 1 + 2 * np.diff(actions.rank_offset)),
        memory_time_s=np.insert(times_s, 2 * actions.rank_offset[:-1], 0.0),
        memory_bytes=held,
    )


def join_timelines(parts: Sequence[Timeline], **more: Any) -> Timeline:
    """Timelines of a step's replicas as one, tasks and samples in the order of the parts.

    Args:
        parts: at least one.
        more: fields that are not joined: `step_time_s`, and what only the whole step knows.
    """
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (
            *("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s"),
            *("memory_dp_rank", "memory_rank", "memory_time_s", "memory_bytes"),
        )
    }
    return Timeline(**columns, **more)
