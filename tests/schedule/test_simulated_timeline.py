import numpy as np

from evenload.schedule.packflow import packflow_static
from evenload.schedule.simulate import simulate, to_timeline
from pipeline_cases import columns_of, random_tasks, uniform_tasks


def test_memory_rises_at_starts_and_falls_at_ends():
    """One stage: F0 0..1 keeps 10 (+1 while it runs), B0 1..3 needs 2 more and frees 10."""
    tasks = uniform_tasks([1], 1, 1)
    actions = columns_of("0F0 0B0")
    timeline = to_timeline(tasks, actions, simulate(tasks, actions), dp_rank=3, step_time_s=4.0)
    assert timeline.memory_time_s.tolist() == [0, 0, 1, 1, 3]
    assert timeline.memory_bytes.tolist() == [100, 111, 110, 112, 100]
    assert timeline.memory_dp_rank.tolist() == [3] * 5
    assert timeline.bubble_fraction() == 0.25
    assert (timeline.dp_rank.tolist(), timeline.rank.tolist()) == ([3, 3], [0, 0])


def test_samples_hold_the_simulated_peak_in_time_order():
    rng = np.random.default_rng(0)
    for _ in range(100):
        tasks = random_tasks(rng)
        actions = packflow_static(tasks, inject=False)
        simulation = simulate(tasks, actions)
        timeline = to_timeline(tasks, actions, simulation, dp_rank=0, step_time_s=simulation.makespan_s)
        for rank, peak in enumerate(simulation.peak_bytes):
            own = timeline.memory_rank == rank
            assert timeline.memory_bytes[own].max() == peak
            assert (np.diff(timeline.memory_time_s[own]) >= 0).all()
        assert timeline.num_tasks == len(actions.kind)
