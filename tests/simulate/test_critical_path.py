import numpy as np

from evenload.schedule.packflow import packflow_word
from evenload.simulate.reference import reference_simulation
from pipeline_cases import columns_of, random_tasks, uniform_tasks


def test_path_of_the_hand_computed_timeline():
    """The drawing of test_simulate: stage 1 is the bottleneck until its last backward, then the drain."""
    tasks = uniform_tasks([2, 2, 3], 3, 2, hop_s=0.5)
    actions = columns_of("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1B1 1F2 1B2")
    path = reference_simulation(tasks, actions).critical_path
    assert " ".join(map(str, path)) == "0F0 1F0 1F1 1B0 1B1 1F2 1B2 0B2"


def test_path_explains_the_whole_makespan():
    """Durations and hops along the path add up to the makespan; it begins at time 0."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        tasks = random_tasks(rng, whole_seconds=True)  # quarter seconds: sums are exact
        result = reference_simulation(tasks, packflow_word(tasks, inject=True))
        total, previous = 0.0, None
        for action in result.critical_path:
            if previous is not None and previous.stage != action.stage:
                hops = tasks.p2p_forward_s if action.kind == "F" else tasks.p2p_backward_s
                total += hops[action.pack]
            seconds = tasks.forward_s if action.kind == "F" else tasks.backward_s
            total += seconds[action.pack, action.stage]
            previous = action
        assert total == result.end_s.max()
