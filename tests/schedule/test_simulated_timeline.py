import numpy as np

from evenload.schedule.packflow import packflow_static
from evenload.schedule.simulate import simulate, to_timeline
from pipeline_cases import random_tasks


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
