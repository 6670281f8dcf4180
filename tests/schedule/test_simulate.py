import dataclasses

import numpy as np
import pytest

from evenload.errors import ScheduleDeadlockError
from evenload.schedule.packflow import packflow_list, packflow_static
from evenload.schedule.simulate import simulate
from evenload.schedule.static_schedules import gpipe, one_f_one_b
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import columns_of, equal_packs, random_ranks, random_tasks, uniform_tasks, with_split
from reference.simulation import reference_simulation


def random_schedule(rng: np.random.Generator, tasks: PipelineTasks) -> ActionColumns:
    cap = np.full(tasks.num_ranks, rng.choice([0, 200, 2**60]), dtype=np.int64)
    made = [
        lambda: one_f_one_b(tasks),
        lambda: gpipe(tasks),
        lambda: packflow_static(tasks, inject=True),
        lambda: packflow_list(tasks, cap_bytes=cap, alternate=bool(rng.integers(2))),
    ]
    return made[int(rng.integers(4))]()


def test_hand_computed_timeline_of_a_sliced_document():
    """tF = 1, tB = 2, hop = 0.5. Document 0 is in packs 0, 1 of both directions, document 1 in pack 2.

    time      0    1    2    3    4    5    6    7    8    9   10   11   12   13
    stage 0   |F0  |F1  |F2  |              ..|B0       |B1       |   ..|B2      |     ends 13
    stage 1        ..|F0 |F1 |B0       |B1       |F2  |B2       |                       ends 10.5
    """
    tasks = uniform_tasks([2, 2, 3], 3, 2, p2p_s=0.5)
    actions = columns_of("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1B1 1F2 1B2")
    result = simulate(tasks, actions)
    assert result.start_s.tolist() == [0, 1, 2, 6, 8, 11, 1.5, 2.5, 3.5, 5.5, 7.5, 8.5]
    assert result.end_s.tolist() == [1, 2, 3, 8, 10, 13, 2.5, 3.5, 5.5, 7.5, 8.5, 10.5]
    assert result.makespan_s == 13
    # Stage 0 holds three packs of 10 when B0 adds its 2; stage 1 two.
    assert result.peak_bytes.tolist() == [132, 122]


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_packs", [1, 4, 9])
def test_equal_packs_have_the_closed_forms(num_packs, num_stages):
    """(m + P - 1) (tF + tB); GPipe also with hops, of which the fill and the drain each see P - 1."""
    times = {"forward_s": 1.25, "backward_s": 2.5}
    tasks = equal_packs(num_packs, num_stages, **times)
    expected = (num_packs + num_stages - 1) * 3.75
    assert simulate(tasks, one_f_one_b(tasks)).makespan_s == expected
    with_hops = equal_packs(num_packs, num_stages, p2p_s=0.5, **times)
    assert simulate(with_hops, gpipe(with_hops)).makespan_s == expected + (num_stages - 1) * 1.0


def test_random_schedules_equal_the_graph_to_the_bit():
    rng = np.random.default_rng(0)
    split = 0
    for _ in range(600):
        tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.3 else None)
        actions = random_schedule(rng, tasks)
        if rng.random() < 0.4:  # whole and split backwards in one schedule, several stages on a rank
            tasks = with_split(tasks, rng)
            cap = np.full(tasks.num_ranks, rng.choice([0, 200, 2**60]), dtype=np.int64)
            actions = packflow_list(tasks, cap_bytes=cap, alternate=bool(rng.integers(2)), split=True)
            split += int((actions.kind == 2).sum())
        native, graph = simulate(tasks, actions), reference_simulation(tasks, actions)
        assert native.start_s.tolist() == graph.start_s.tolist()
        assert native.end_s.tolist() == graph.end_s.tolist()
        assert native.peak_bytes.tolist() == graph.peak_bytes.tolist()
        assert native.makespan_s == max(native.end_s.max(initial=0.0), 0.0)
    assert split > 1000


def peak_by_events(tasks: PipelineTasks, actions: ActionColumns) -> list[int]:
    """Live bytes from a list of (what happens) per rank, in the order the rank runs."""
    peaks = []
    for rank, row in enumerate(actions.to_schedule().ranks):
        levels = [int(tasks.held.static_bytes[rank])]
        for action in row:
            at = (action.pack, action.stage)
            if action.kind == "F":
                held = levels[-1] + int(tasks.held.forward_kept_bytes[at])
                levels += [held + int(tasks.held.forward_temp_bytes[at]), held]
            else:
                levels += [
                    levels[-1] + int(tasks.held.backward_temp_bytes[at]),
                    levels[-1] - int(tasks.held.backward_freed_bytes[at]),
                ]
        peaks.append(max(levels))
    return peaks


def test_peak_counts_every_event_also_backwards_that_leave_more():
    rng = np.random.default_rng(1)
    for _ in range(200):
        tasks = random_tasks(rng)
        freed = rng.integers(-60, 60, tasks.held.backward_freed_bytes.shape)
        tasks = dataclasses.replace(tasks, held=dataclasses.replace(tasks.held, backward_freed_bytes=freed))
        actions = random_schedule(rng, tasks)
        for result in (simulate(tasks, actions), reference_simulation(tasks, actions)):
            assert result.peak_bytes.tolist() == peak_by_events(tasks, actions)


def test_deadlock_names_the_stuck_actions():
    tasks = equal_packs(2, 2)
    with pytest.raises(ScheduleDeadlockError) as caught:
        simulate(tasks, columns_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert str(caught.value).splitlines() == [
        "deadlock: 2 of 8 actions ran",
        "rank 0: 0F0 0B0 <-- waits for 1B0  0F1 0B1",
        "rank 1: 1F0 1F1 <-- waits for 0F1  1B0 1B1",
    ]
    with pytest.raises(ScheduleDeadlockError, match="1F0 <-- waits for 0F0"):
        simulate(tasks, columns_of("0B0", "1F0"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F1", "1F0"), "rank 0 action 0: pack 1 of stage 0 where 0 is next"),
        (("0F0 0F1 0F2", "1F0"), "rank 0 action 2: pack 2 of stage 0 where 2 is next"),
        (("0F0", "0F1"), "rank 1 action 0: stage 0 is not on this rank"),
        (("0F0 0W0", "1F0"), "rank 0 action 1: I or W, but these tasks have no split"),
    ],
)
def test_actions_no_rank_could_run_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        simulate(equal_packs(2, 2), columns_of(*rows))
