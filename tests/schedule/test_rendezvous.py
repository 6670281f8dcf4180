import graphlib

import numpy as np
import pytest

from evenload.errors import ConfigError, ScheduleDeadlockError
from evenload.schedule.one_f_one_b import one_f_one_b
from evenload.schedule.rendezvous import replay_rendezvous
from evenload.simulate.simulate import simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import columns_of, equal_packs, random_ranks, random_tasks


def test_deadlock_shows_every_stuck_action():
    """Rank 0 wants 1B0 before it runs 0F1; rank 1 wants 0F1 before it runs 1B0."""
    actions = columns_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleDeadlockError) as caught:
        replay_rendezvous(actions, forwards_needed=[1, 2], stage_to_rank=[0, 1])
    lines = str(caught.value).splitlines()
    assert lines[0] == "deadlock with directed channels, prefetch 2: 2 of 8 actions ran"
    assert lines[1] == "rank 0: 0F0 0B0 <-- waits for 1B0  0F1 0B1"
    assert lines[2] == "rank 1: 1F0 1F1 <-- waits for 0F1  1B0 1B1"


def test_backward_before_its_forwards_is_stuck_on_them():
    with pytest.raises(ScheduleDeadlockError, match="rank 0: 0F0 0B0 <-- waits for 0F1  0F1"):
        replay_rendezvous(columns_of("0F0 0B0 0F1"), forwards_needed=[2], stage_to_rank=[0])


def test_long_rows_show_the_surroundings_only():
    row = " ".join(f"0F{k}" for k in range(20)) + " 0B0 " + " ".join(f"0B{j}" for j in range(1, 20))
    with pytest.raises(ScheduleDeadlockError) as caught:
        replay_rendezvous(columns_of(row), forwards_needed=[21] + [20] * 19, stage_to_rank=[0])
    assert "rank 0: (16 before) 0F16 0F17 0F18 0F19 0B0 <-- waits for 0F20  0B1" in str(caught.value)
    assert "0B6 (13 more)" in str(caught.value)


def test_sender_and_receiver_in_other_orders_never_match():
    """A first-in-first-out channel delivers 0F0 first, whatever the receiver asked for."""
    actions = columns_of("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1")
    for prefetch in (0, 2):
        with pytest.raises(ScheduleDeadlockError):
            replay_rendezvous(actions, forwards_needed=[2, 2], stage_to_rank=[0, 1], prefetch=prefetch)


def random_interleaving(rng: np.random.Generator, tasks: PipelineTasks) -> ActionColumns:
    """The static word with noise in its keys: every rank keeps pack order per stage and direction."""
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


def test_replay_simulator_and_graph_agree_on_what_deadlocks():
    rng = np.random.default_rng(0)
    circles = 0
    for _ in range(800):
        ranks = random_ranks(rng) if rng.random() < 0.3 else None
        tasks = random_tasks(rng, ranks=ranks)
        actions = random_interleaving(rng, tasks)
        arguments = {
            "forwards_needed": tasks.forwards_needed.tolist(),
            "stage_to_rank": tasks.stage_to_rank.tolist(),
            "prefetch": int(rng.integers(0, 4)),
        }
        if has_circle(tasks, actions):
            circles += 1
            with pytest.raises(ScheduleDeadlockError, match="waits for"):
                replay_rendezvous(actions, **arguments)
            for backend in ("native", "python"):
                with pytest.raises(ScheduleDeadlockError, match="waits for"):
                    simulate(tasks, actions, backend=backend)
        else:
            replay_rendezvous(actions, **arguments)
            simulate(tasks, actions)
    assert 100 < circles < 700, "both outcomes must be frequent"


def test_single_queue_deadlocks_where_directed_channels_do_not():
    """Plain 1F1B: with early receives both ranks' queues start with what the other sends last."""
    tasks = equal_packs(4, 2)
    arguments = {"forwards_needed": tasks.forwards_needed.tolist(), "stage_to_rank": [0, 1]}
    replay_rendezvous(one_f_one_b(tasks), **arguments)
    with pytest.raises(ScheduleDeadlockError, match="single channels"):
        replay_rendezvous(one_f_one_b(tasks), channels="single", **arguments)
    # One pack, receives just in time: both ranks post F0 and then B0.
    one = equal_packs(1, 2)
    replay_rendezvous(one_f_one_b(one), forwards_needed=[1], stage_to_rank=[0, 1], channels="single", prefetch=0)


def test_negative_prefetch_is_refused():
    with pytest.raises(ConfigError, match="prefetch is -1"):
        replay_rendezvous(columns_of("0F0 0B0"), forwards_needed=[1], stage_to_rank=[0], prefetch=-1)
