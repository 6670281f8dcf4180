from evenload.simulate.links import hops
from evenload.simulate.simulate import simulate
from pipeline_cases import columns_of, uniform_tasks


def test_transfers_of_a_link_do_not_queue():
    """Two forwards of 1 s, transfers of 3 s: the second starts while the first is on its way."""
    tasks = uniform_tasks([2], 2, 2, hop_s=3.0)
    actions = columns_of("0F0 0F1", "1F0 1F1")
    found = hops(tasks, actions, simulate(tasks, actions))
    assert (found.start_s.tolist(), found.end_s.tolist()) == ([1, 2], [4, 5])
    assert (found.producer.tolist(), found.consumer.tolist()) == ([0, 1], [2, 3])


def test_no_actions_no_transfers():
    tasks = uniform_tasks([], 0, 2)
    actions = columns_of("", "")
    assert len(hops(tasks, actions, simulate(tasks, actions)).start_s) == 0
