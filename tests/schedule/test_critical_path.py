"""The critical path of a simulated schedule, and where its idle time goes."""

import numpy as np
import pytest

from evenload.explore.timelines import critical_path, p2p_transfers, split_bubble
from evenload.schedule.packflow import packflow_list, packflow_static
from evenload.schedule.simulate import Simulation, simulate
from evenload.schedule.static_schedules import one_f_one_b
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import columns_of, equal_packs, random_ranks, random_tasks, uniform_tasks, with_split


def path_names(path: np.ndarray, actions: ActionColumns) -> str:
    flat = [action for row in actions.to_schedule().ranks for action in row]
    return " ".join(str(flat[index]) for index in path.tolist())


def random_case(rng: np.random.Generator) -> tuple[PipelineTasks, ActionColumns]:
    """Any cuts, virtual stages, split and whole backwards."""
    tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.4 else None)
    if rng.random() < 0.5:
        tasks = with_split(tasks, rng)
        cap = np.full(tasks.num_ranks, rng.choice([0, 200, 2**60]), dtype=np.int64)
        return tasks, packflow_list(tasks, cap_bytes=cap, split=True)
    return tasks, packflow_static(tasks, inject=bool(rng.integers(2)))


def test_path_and_split_of_the_hand_computed_timeline():
    """The drawing of test_simulate, ranks * makespan = 26: stage 1 is the bottleneck until its last backward.

    stage 0: busy 9; gap 3..6 before B0, produced at 5.5: 2.5 waiting for stage 1, 0.5 for the hop;
             gap 10..11 before B2, produced at 10.5: 0.5 and 0.5
    stage 1: starts at 1.5, busy 9 without a gap, ends at 10.5: cool-down 2.5
    """
    tasks = uniform_tasks([2, 2, 3], 3, 2, p2p_s=0.5)
    actions = columns_of("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1B1 1F2 1B2")
    simulation = simulate(tasks, actions)
    path = critical_path(tasks, actions, simulation)
    assert path_names(path, actions) == "0F0 1F0 1F1 1B0 1B1 1F2 1B2 0B2"
    assert (simulation.start_s[path][1:] - simulation.end_s[path][:-1]).tolist() == [0.5, 0, 0, 0, 0, 0, 0.5]
    bubble = split_bubble(tasks, actions, simulation)
    assert (busy_seconds(simulation), bubble.warmup_s, bubble.cooldown_s) == (18.0, 1.5, 2.5)
    assert (bubble.p2p_s, bubble.dependency_s) == (1.0, 3.0)
    assert (bubble.stage_imbalance_s, bubble.imbalance_s) == (0.0, 0.0)
    assert sum(bubble) == pytest.approx(8)


def test_path_explains_the_whole_makespan_to_the_bit():
    """Durations and p2p transfers along the path, in order, are the makespan."""
    rng = np.random.default_rng(0)
    for _ in range(400):
        tasks, actions = random_case(rng)
        simulation = simulate(tasks, actions)
        path = critical_path(tasks, actions, simulation)
        start_s, end_s = simulation.start_s[path], simulation.end_s[path]
        assert (start_s[0], end_s[-1]) == (0, simulation.makespan_s)
        producer, consumer, _, arrives_s = (one.tolist() for one in p2p_transfers(tasks, actions, simulation))
        arrival = dict(zip(zip(producer, consumer, strict=True), arrives_s, strict=True))
        pairs = zip(path.tolist(), path.tolist()[1:], strict=False)
        for (before, after), begins_s, ended_s in zip(pairs, start_s[1:], end_s[:-1], strict=True):
            # Two actions of one rank follow each other at once; from a stage to the next there is a transfer.
            on_one_rank = actions.rank[before] == actions.rank[after] and after == before + 1
            assert begins_s == (ended_s if on_one_rank and begins_s == ended_s else arrival[before, after])


def busy_seconds(simulation: Simulation) -> float:
    return float((simulation.end_s - simulation.start_s).sum())


def test_1f1b_fraction_is_the_textbook_one():
    """(P - 1) / (m + P - 1)."""
    tasks = equal_packs(12, 4)
    actions = one_f_one_b(tasks)
    simulation = simulate(tasks, actions)
    bubble = split_bubble(tasks, actions, simulation)
    assert sum(bubble) / (4 * simulation.makespan_s) == pytest.approx(3 / 15)
    assert bubble.p2p_s == 0


def test_parts_add_up_to_all_ranks_time():
    rng, seen = np.random.default_rng(0), np.zeros(6, int)
    for trial in range(400):
        exact = trial % 2 == 0
        tasks = random_tasks(rng, ranks=random_ranks(rng) if trial % 3 == 0 else None, whole_seconds=exact)
        cap = np.full(tasks.num_ranks, 150, dtype=np.int64)
        actions = packflow_list(tasks, cap_bytes=cap) if trial % 5 else packflow_static(tasks, inject=True)
        simulation = simulate(tasks, actions)
        bubble = split_bubble(tasks, actions, simulation)
        assert min(bubble) >= 0
        available = tasks.num_ranks * simulation.makespan_s
        assert busy_seconds(simulation) + sum(bubble) == pytest.approx(available, rel=1e-12)
        seen += np.array(bubble) > 0
    assert (seen > 50).all(), "every cause occurs"


def test_a_gap_is_explained_by_the_whole_chain_before_it():
    """Three stages, tF = 1 but pack 1 takes 3 on stage 0; hops 0.5.

    stage 0  F0 0..1, F1 1..4, F2 4..5
    stage 1  F0 1.5..2.5, F1 4.5..5.5: gap 2 = hop 0.5 and 1.5 of 0F1
    stage 2  F0 3..4, F1 6..7: gap 2 = hop 0.5, 1F1 1.0, hop 0.5
    packs equal: stage 0 takes 5/3 a pack, so stages 1 and 2 have gaps of 2/3 = hop 1/2 and 1/6 of the stage before
    stages equal, too: no gap
    """
    tasks = uniform_tasks([3], 3, 3, p2p_s=0.5)
    tasks.forward_s[1, 0] = 3.0
    actions = columns_of("0F0 0F1 0F2", "1F0 1F1", "2F0 2F1")
    simulation = simulate(tasks, actions)
    assert simulation.start_s.tolist() == [0, 1, 4, 1.5, 4.5, 3, 6]
    bubble = split_bubble(tasks, actions, simulation)
    assert (bubble.p2p_s, bubble.dependency_s) == (1.5, 0.0)
    assert bubble.stage_imbalance_s == pytest.approx(2 / 6)
    assert bubble.imbalance_s == pytest.approx(1.5 + 1.0 - 2 / 6)


def test_empty_step_has_no_bubble():
    tasks = uniform_tasks([], 0, 2)
    actions = one_f_one_b(tasks)
    assert sum(split_bubble(tasks, actions, simulate(tasks, actions))) == 0
