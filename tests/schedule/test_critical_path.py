import dataclasses

import numpy as np
import pytest

from evenload.schedule.critical_path import CriticalPath, action_seconds, critical_path, p2p_transfers
from evenload.schedule.packflow import packflow_list, packflow_static
from evenload.schedule.simulate import simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import columns_of, equal_packs, random_ranks, random_tasks, uniform_tasks, with_split
from reference.simulation import reference_simulation


def path_names(path: CriticalPath, actions: ActionColumns) -> str:
    flat = [action for row in actions.to_schedule().ranks for action in row]
    return " ".join(str(flat[index]) for index in path.actions.tolist())


def random_case(rng: np.random.Generator) -> tuple[PipelineTasks, ActionColumns]:
    """Any cuts, virtual stages, split and whole backwards."""
    tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.4 else None)
    if rng.random() < 0.5:
        tasks = with_split(tasks, rng)
        cap = np.full(tasks.num_ranks, rng.choice([0, 200, 2**60]), dtype=np.int64)
        return tasks, packflow_list(tasks, cap_bytes=cap, split=True)
    return tasks, packflow_static(tasks, inject=bool(rng.integers(2)))


def test_path_of_the_hand_computed_timeline():
    """The drawing of test_simulate: stage 1 is the bottleneck until its last backward, then the drain."""
    tasks = uniform_tasks([2, 2, 3], 3, 2, p2p_s=0.5)
    actions = columns_of("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1B1 1F2 1B2")
    path = critical_path(tasks, actions, simulate(tasks, actions))
    assert path_names(path, actions) == "0F0 1F0 1F1 1B0 1B1 1F2 1B2 0B2"
    assert path.p2p_s.tolist() == [0, 0.5, 0, 0, 0, 0, 0, 0.5]
    assert path.compute_s.tolist() == [[1, 2, 0, 0], [3, 6, 0, 0]]
    assert (path.makespan_s, path.communication_s) == (13.0, 1.0)
    assert path.describe() == "rank 1 computes 69.2 % of it (F 23.1, B 46.2), rank 0 23.1 %, p2p 7.7 %"


def test_path_explains_the_whole_makespan_to_the_bit():
    """Durations and p2p transfers along the path, in order, are the makespan; it is the path of the explicit graph."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        tasks, actions = random_case(rng)
        simulation = simulate(tasks, actions)
        path = critical_path(tasks, actions, simulation)
        assert path.makespan_s == simulation.makespan_s
        assert path.compute_s.sum() + path.communication_s == pytest.approx(simulation.makespan_s, rel=1e-12)
        reference = reference_simulation(tasks, actions)
        assert path_names(path, actions) == " ".join(map(str, reference.critical_path))


def with_seconds(tasks: PipelineTasks, actions: ActionColumns, seconds: np.ndarray) -> PipelineTasks:
    """The same tasks with other seconds of each action (a pack's parts on its own where its backward is split)."""
    columns = [tasks.forward_s, tasks.backward_s]
    columns += [tasks.split.input_s, tasks.split.weight_s] if tasks.split else []
    changed = [column.copy() for column in columns]
    for kind, column in enumerate(changed):
        chosen = actions.kind == kind
        column[actions.pack[chosen], actions.stage[chosen]] = seconds[chosen]
    split = tasks.split and dataclasses.replace(tasks.split, input_s=changed[2], weight_s=changed[3])
    return dataclasses.replace(tasks, forward_s=changed[0], backward_s=changed[1], split=split)


def test_only_the_path_decides_the_makespan():
    """Everything else may take no time at all; a longer action on the path delays the end by as much."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        tasks, actions = random_case(rng)
        simulation = simulate(tasks, actions)
        path = critical_path(tasks, actions, simulation)
        seconds = action_seconds(tasks, actions)
        on_path = np.zeros(len(seconds), bool)
        on_path[path.actions] = True
        shortened = with_seconds(tasks, actions, np.where(on_path, seconds, seconds * rng.choice([0, 0.5])))
        assert simulate(shortened, actions).makespan_s == simulation.makespan_s
        delayed = seconds.copy()
        delayed[rng.choice(path.actions)] += 1.0
        longer_s = simulate(with_seconds(tasks, actions, delayed), actions).makespan_s
        assert longer_s == pytest.approx(simulation.makespan_s + 1.0)


def test_equal_packs_are_bound_by_one_rank_and_the_fill_and_drain():
    """1F1B without p2p transfers: F of every stage down, one rank's work, B of every stage up."""
    tasks = equal_packs(6, 3)
    actions = packflow_static(tasks, inject=False)
    path = critical_path(tasks, actions, simulate(tasks, actions))
    assert path.makespan_s == (6 + 2) * 3
    assert path.communication_s == 0
    assert path.compute_s[:, :2].sum(axis=0).tolist() == [8, 16]


def test_an_empty_schedule_has_no_path():
    tasks = uniform_tasks([], 0, 2)
    path = critical_path(tasks, columns_of("", ""), simulate(tasks, columns_of("", "")))
    assert (len(path.actions), path.makespan_s, path.describe()) == (0, 0.0, "")


def test_transfers_of_a_link_do_not_queue():
    """Two forwards of 1 s, transfers of 3 s: the second starts while the first is on its way."""
    tasks = uniform_tasks([2], 2, 2, p2p_s=3.0)
    actions = columns_of("0F0 0F1", "1F0 1F1")
    producer, consumer, start_s, end_s = p2p_transfers(tasks, actions, simulate(tasks, actions))
    assert (start_s.tolist(), end_s.tolist()) == ([1, 2], [4, 5])
    assert (producer.tolist(), consumer.tolist()) == ([0, 1], [2, 3])


def test_no_actions_no_transfers():
    tasks = uniform_tasks([], 0, 2)
    actions = columns_of("", "")
    assert all(len(column) == 0 for column in p2p_transfers(tasks, actions, simulate(tasks, actions)))
