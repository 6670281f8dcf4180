"""A simulation as the `Timeline` that reports draw and measured runs are compared with. O(actions)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenload.simulate.memory_ledger import action_bytes
from evenload.simulate.simulate import Simulation
from evenload.types.pipeline import ActionColumns, PipelineTasks
from evenload.types.timeline import Timeline


def to_timeline(
    tasks: PipelineTasks, actions: ActionColumns, simulation: Simulation, dp_rank: int, step_time_s: float
) -> Timeline:
    """Tasks in schedule order; memory samples at the start of the step and at every start and end of a task.

    Args:
        simulation: of `tasks` and `actions`.
        dp_rank: the replica's index.
        step_time_s: of the whole step (slowest replica, reduction, optimizer).
    """
    rank = np.repeat(np.arange(actions.num_ranks, dtype=np.int32), np.diff(actions.rank_offset))
    kept, freed, temporary = action_bytes(tasks.held, tasks.split, actions)
    times, samples, sample_ranks = [], [], []
    for r in range(actions.num_ranks):
        own = slice(int(actions.rank_offset[r]), int(actions.rank_offset[r + 1]))
        after = tasks.held.static_bytes[r] + np.cumsum(kept[own] - freed[own])
        running = after + freed[own] + temporary[own]
        times.append(np.stack([simulation.start_s[own], simulation.end_s[own]], axis=1).ravel())
        samples.append(np.stack([running, after], axis=1).ravel())
        sample_ranks.append(np.full(1 + len(samples[-1]), r, dtype=np.int32))
    return Timeline(
        dp_rank=np.full(len(actions.kind), dp_rank, dtype=np.int32),
        rank=rank,
        stage=actions.stage,
        kind=actions.kind,
        pack=actions.pack,
        start_s=simulation.start_s,
        end_s=simulation.end_s,
        step_time_s=step_time_s,
        memory_dp_rank=np.full(sum(map(len, sample_ranks)), dp_rank, dtype=np.int32),
        memory_rank=np.concatenate(sample_ranks),
        memory_time_s=np.concatenate([np.concatenate([[0.0], column]) for column in times]),
        memory_bytes=np.concatenate(
            [np.concatenate([tasks.held.static_bytes[r : r + 1], column]) for r, column in enumerate(samples)]
        ),
    )


def join_timelines(parts: Sequence[Timeline], **more: Any) -> Timeline:
    """Timelines of a step's replicas as one, tasks and samples in the order of the parts.

    Args:
        parts: at least one.
        more: fields that are not joined: `step_time_s`, and what only the whole step knows.
    """
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (
            *("dp_rank", "rank", "stage", "kind", "pack", "start_s", "end_s"),
            *("memory_dp_rank", "memory_rank", "memory_time_s", "memory_bytes"),
        )
    }
    return Timeline(**columns, **more)
