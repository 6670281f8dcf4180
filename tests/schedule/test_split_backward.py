import dataclasses

import numpy as np
import pytest

from evenload.errors import ConfigError, InvalidPlanError, ScheduleDeadlockError
from evenload.schedule.critical_path import split_bubble
from evenload.schedule.packflow import packflow_list
from evenload.schedule.simulate import simulate, to_timeline
from pipeline_cases import caps, check_order, columns_of, equal_packs, names_of, random_ranks, random_tasks, with_split
from reference.list_schedule import list_schedule
from reference.simulation import reference_simulation

UNLIMITED = 2**60


def test_weights_fill_idle_time():
    """tF = tI = tW = 1, two stages, two packs.

    time      0   1   2   3   4   5   6   7
    stage 0  |F0 |F1 | . |I0 |W0 |I1 |W1 |         whole backwards would end at 9: F0 F1 . . B0 . B1 without splitting
    stage 1  | . |F0 |I0 |F1 |I1 |W0 |W1 |
    """
    tasks = with_split(equal_packs(2, 2))
    actions = packflow_list(tasks, cap_bytes=caps(tasks, UNLIMITED), split=True)
    assert names_of(actions) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]
    result = simulate(tasks, actions)
    assert result.end_s.tolist() == [1, 2, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7]
    whole = packflow_list(tasks, cap_bytes=caps(tasks, UNLIMITED))
    assert simulate(tasks, whole).makespan_s == 9
    assert sum(split_bubble(tasks, actions, result)) == 2 * 7 - 12


def test_memory_of_inputs_and_weights():
    """I gives back 4 of 10 and W the other 6; I needs 5 besides: peak 100 + 10 + 5, then 106, then 100."""
    tasks = with_split(equal_packs(1, 1))
    split = dataclasses.replace(
        tasks.split,  # type: ignore[arg-type]
        input_freed_bytes=np.array([[4]]),
        input_temp_bytes=np.array([[5]]),
        weight_freed_bytes=np.array([[6]]),
    )
    tasks = dataclasses.replace(tasks, split=split)
    actions = columns_of("0F0 0I0 0W0")
    result = simulate(tasks, actions)
    assert result.peak_bytes.tolist() == [115]
    timeline = to_timeline(tasks, actions, result, 0, result.makespan_s)
    assert timeline.memory_bytes.tolist() == [100, 111, 110, 115, 106, 106, 100]


def test_random_splits_never_deadlock_keep_the_cap_and_equal_the_reference():
    rng = np.random.default_rng(0)
    split_backwards = whole_backwards = 0
    for trial in range(900):
        tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.4 else None, whole_seconds=trial % 2 == 0)
        tasks = with_split(tasks, rng)
        cap = int(rng.choice([0, rng.integers(1, 400), UNLIMITED]))
        rule = {"alternate": bool(rng.integers(2)), "lookahead": None if rng.random() < 0.5 else int(rng.integers(4))}
        actions = packflow_list(tasks, cap_bytes=caps(tasks, cap), split=True, **rule)
        check_order(tasks, actions)
        split_backwards += int((actions.kind == 2).sum())
        whole_backwards += int((actions.kind == 1).sum())
        simulation = simulate(tasks, actions)
        if trial % 3 == 0:
            reference = list_schedule(tasks, cap_bytes=caps(tasks, cap), split=True, **rule)
            for name in ("kind", "stage", "pack", "rank_offset"):
                assert np.array_equal(getattr(actions, name), getattr(reference, name)), name
            again = reference_simulation(tasks, actions)
            assert simulation.start_s.tolist() == again.start_s.tolist()
            assert simulation.end_s.tolist() == again.end_s.tolist()
            assert simulation.peak_bytes.tolist() == again.peak_bytes.tolist()
        if tasks.num_ranks == tasks.num_stages:
            # What whole backwards hold at least where the cap is 0: I and W add nothing to it.
            least = simulate(tasks, packflow_list(tasks, cap_bytes=caps(tasks, 0), lookahead=0)).peak_bytes
            assert (simulation.peak_bytes <= np.maximum(cap, least)).all()
    assert split_backwards > 1000
    assert whole_backwards > 1000


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0I0", "0W0 is missing after 0I0"),
        ("0F0 0W0 0I0", "0I0 does not stand before it"),
        ("0F0 0B0 0W0", "0I0 does not stand before it"),
        ("0F0 0I0 0W0 0W0", "has had its W"),
        ("0F0 0I0 0B0 0W0", "0B0 where no further one is next"),
    ],
)
def test_broken_splits_are_named(row, message):
    tasks = with_split(equal_packs(1, 1))
    with pytest.raises(InvalidPlanError, match=message):
        check_order(tasks, columns_of(row))


def test_simulator_refuses_and_finds_stuck_weights():
    tasks = with_split(equal_packs(1, 1))
    with pytest.raises(ScheduleDeadlockError, match="0W0 <-- waits for 0I0"):
        simulate(tasks, columns_of("0F0 0W0 0I0"))
    with pytest.raises(ValueError, match="W of pack 0 where its backward was whole or W ran already"):
        simulate(tasks, columns_of("0F0 0B0 0W0"))
    with pytest.raises(ConfigError, match="no split columns"):
        packflow_list(equal_packs(1, 1), cap_bytes=caps(tasks, 0), split=True)
