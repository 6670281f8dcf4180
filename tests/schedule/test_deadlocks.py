import graphlib
from contextlib import nullcontext

import numpy as np
import pytest

from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.schedule.simulate import simulate
from evenload.schedule.validate import check_schedule
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import random_ranks, random_tasks
from reference.simulation import reference_simulation


def random_interleaving(rng: np.random.Generator, tasks: PipelineTasks) -> ActionColumns:
    """The static order with noise in its keys: every rank keeps pack order per stage and direction."""
    kinds, stages, packs, offset = [], [], [], [0]
    noise = rng.choice([0.5, 1.0, 2.0, 8.0])
    needed = np.maximum.accumulate(tasks.forwards_needed).tolist()
    for rank in range(tasks.num_ranks):
        keys = []
        for stage in np.flatnonzero(tasks.stage_to_rank == rank).tolist():
            ahead = tasks.num_stages - 1 - stage
            keys += [(k - ahead + noise * rng.random(), 0, stage) for k in range(tasks.num_forward)]
            keys += [(f - 0.5 + noise * rng.random(), 1, stage) for f in needed]
        seen: dict[tuple[int, int], int] = {}
        for _, kind, stage in sorted(keys):
            kinds.append(kind)
            stages.append(stage)
            packs.append(seen.setdefault((kind, stage), 0))
            seen[kind, stage] += 1
        offset.append(len(kinds))
    return ActionColumns(
        kind=np.array(kinds, dtype=np.uint8),
        stage=np.array(stages, dtype=np.int32),
        pack=np.array(packs, dtype=np.int32),
        rank_offset=np.array(offset, dtype=np.int64),
    )


def has_circle(tasks: PipelineTasks, actions: ActionColumns) -> bool:
    """By the standard library's topological sort over all edges, one per needed forward."""
    graph: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for row in actions.to_schedule().ranks:
        previous = None
        for action in row:
            node = (action.kind, action.stage, action.pack)
            edges = graph.setdefault(node, set())
            if previous is not None:
                edges.add(previous)
            if action.kind == "F" and action.stage > 0:
                edges.add(("F", action.stage - 1, action.pack))
            if action.kind == "B" and action.stage + 1 < tasks.num_stages:
                edges.add(("B", action.stage + 1, action.pack))
            if action.kind == "B":
                edges.update(("F", action.stage, k) for k in range(tasks.forwards_needed[action.pack]))
            previous = node
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return True
    return False


def test_simulator_check_and_graph_agree_on_what_deadlocks():
    rng = np.random.default_rng(0)
    circles = 0
    for _ in range(800):
        ranks = random_ranks(rng) if rng.random() < 0.3 else None
        tasks = random_tasks(rng, ranks=ranks)
        actions = random_interleaving(rng, tasks)
        arguments = {
            "forwards_needed": tasks.forwards_needed.tolist(),
            "stage_to_rank": tasks.stage_to_rank.tolist(),
        }
        circle = has_circle(tasks, actions)
        circles += circle
        with pytest.raises(ScheduleDeadlockError, match="waits for") if circle else nullcontext():
            simulate(tasks, actions)
        with pytest.raises(InvalidPlanError) if circle else nullcontext():
            check_schedule(
                actions,
                num_forward=tasks.num_forward,
                forwards_needed=arguments["forwards_needed"],
                stage_to_rank=arguments["stage_to_rank"],
            )
        assert (reference_simulation(tasks, actions).done.sum() < len(actions.kind)) == circle
    assert 100 < circles < 700, "both outcomes must be frequent"
