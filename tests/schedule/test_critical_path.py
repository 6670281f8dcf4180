import numpy as np
import pytest

from evenload.schedule.critical_path import CriticalPath, critical_path
from evenload.schedule.packflow import packflow_list, packflow_static
from evenload.schedule.simulate import simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import columns_of, random_ranks, random_tasks, uniform_tasks, with_split
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
