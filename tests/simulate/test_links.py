from functools import cache

import numpy as np
import pytest

from evenload.schedule.packflow import packflow_list, packflow_word
from evenload.simulate.links import hops, simulate_links
from evenload.simulate.simulate import simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import columns_of, equal_packs, random_ranks, random_tasks, uniform_tasks, with_split


def random_case(rng: np.random.Generator) -> tuple[PipelineTasks, ActionColumns]:
    tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.5 else None)
    tasks.p2p_forward_s[:] = rng.lognormal(0, 1, tasks.num_forward)
    tasks.p2p_backward_s[:] = rng.lognormal(0, 1, tasks.num_backward)
    if rng.random() < 0.5:
        tasks = with_split(tasks, rng)
        return tasks, packflow_list(tasks, cap_bytes=np.full(tasks.num_ranks, 2**60), split=True)
    return tasks, packflow_word(tasks, inject=bool(rng.integers(2)))


def test_hops_queue_on_their_link_by_hand():
    """Two forwards of 1 s, hops of 3 s: the second hop waits for the first, 4..7 instead of 2..5.

    stage 0 ends 1, 2; arrivals 4, 7 (as delays 4, 5); stage 1 runs 4..5, 7..8 (as delays 4..5, 5..6)
    """
    tasks = uniform_tasks([2], 2, 2, hop_s=3.0)
    actions = columns_of("0F0 0F1", "1F0 1F1")
    simulation, queued = simulate_links(tasks, actions)
    assert (queued.start_s.tolist(), queued.end_s.tolist()) == ([1, 4], [4, 7])
    assert simulation.start_s.tolist() == [0, 1, 4, 7]
    delays = hops(tasks, actions, simulate(tasks, actions))
    assert (delays.start_s.tolist(), delays.end_s.tolist()) == ([1, 2], [4, 5])
    assert (delays.producer.tolist(), delays.consumer.tolist()) == ([0, 1], [2, 3])


def ends_with_links(tasks: PipelineTasks, actions: ActionColumns) -> list[float]:
    """Longest path of the graph in which hops are nodes too, chained by their sender's order on every link."""
    flat = [(rank, action) for rank, row in enumerate(actions.to_schedule().ranks) for action in row]
    place = {(a.kind.replace("I", "B"), a.stage, a.pack): i for i, (_, a) in enumerate(flat)}
    place |= {("I", a.stage, a.pack): i for i, (_, a) in enumerate(flat) if a.kind == "I"}
    columns = {"F": tasks.forward_s, "B": tasks.backward_s}
    if tasks.split:
        columns |= {"I": tasks.split.input_s, "W": tasks.split.weight_s}

    def target(i: int) -> int | None:
        kind, stage, pack = flat[i][1].kind.replace("I", "B"), flat[i][1].stage, flat[i][1].pack
        return place.get((kind, stage + (1 if kind == "F" else -1), pack)) if kind != "W" else None

    before_on_link: dict[int, int] = {}
    last: dict[tuple[int, int], int] = {}
    for i, (rank, _) in enumerate(flat):
        to = target(i)
        if to is not None:
            link = rank, flat[to][0]
            if link in last:
                before_on_link[i] = last[link]
            last[link] = i
    source = {target(i): i for i in range(len(flat)) if target(i) is not None}

    @cache
    def hop_end(i: int) -> float:
        action = flat[i][1]
        hop_s = (tasks.p2p_forward_s if action.kind == "F" else tasks.p2p_backward_s)[action.pack]
        return max(end(i), hop_end(before_on_link[i]) if i in before_on_link else 0.0) + float(hop_s)

    @cache
    def end(i: int) -> float:
        rank, action = flat[i]
        inputs = [0.0]
        if i and flat[i - 1][0] == rank:
            inputs.append(end(i - 1))
        if i in source:
            inputs.append(hop_end(source[i]))
        return max(inputs) + float(columns[action.kind][action.pack, action.stage])

    return [end(i) for i in range(len(flat))]


def test_queueing_equals_the_longest_path_with_hops_as_nodes():
    rng, later = np.random.default_rng(0), 0
    for _ in range(200):
        tasks, actions = random_case(rng)
        simulation, queued = simulate_links(tasks, actions)
        assert simulation.end_s.tolist() == ends_with_links(tasks, actions)
        as_delays = simulate(tasks, actions)
        assert (simulation.start_s >= as_delays.start_s).all()
        assert simulation.peak_bytes.tolist() == as_delays.peak_bytes.tolist()
        later += simulation.makespan_s > as_delays.makespan_s
        rank = np.searchsorted(actions.rank_offset, np.arange(len(actions.kind)), side="right") - 1
        for link in set(zip(rank[queued.producer].tolist(), rank[queued.consumer].tolist(), strict=True)):
            own = (rank[queued.producer] == link[0]) & (rank[queued.consumer] == link[1])
            order = np.argsort(queued.start_s[own], kind="stable")
            assert (queued.start_s[own][order][1:] >= queued.end_s[own][order][:-1]).all(), "one at a time"
    assert later > 50


@pytest.mark.parametrize("hop_s", [0.0, 0.5])
def test_without_overlap_both_agree_to_the_bit(hop_s):
    tasks = equal_packs(6, 3, hop_s=hop_s)
    actions = packflow_word(tasks, inject=True)
    simulation, queued = simulate_links(tasks, actions)
    delays = hops(tasks, actions, simulate(tasks, actions))
    assert simulation.end_s.tolist() == simulate(tasks, actions).end_s.tolist()
    assert queued.start_s.tolist() == delays.start_s.tolist()
    assert queued.end_s.tolist() == delays.end_s.tolist()


def test_no_actions_no_hops():
    tasks = uniform_tasks([], 0, 2)
    simulation, queued = simulate_links(tasks, columns_of("", ""))
    assert (simulation.makespan_s, len(queued.start_s)) == (0.0, 0)
