import dataclasses

import numpy as np
import pytest

from evenload.errors import ConfigError, InvalidPlanError, ScheduleDeadlockError
from evenload.explore.timelines import split_bubble
from evenload.schedule.packflow import packflow_list
from evenload.schedule.simulate import simulate, to_timeline
from pipeline_cases import caps, check_order, columns_of, equal_packs, names_of, with_split

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


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 0I0", "0W0 runs 0 times on rank 0, must run 1 time there"),
        ("0F0 0W0 0I0", "0W0 <-- waits for 0I0"),
        ("0F0 0B0 0W0", "0W0 runs 1 time on rank 0, must run 0 times there"),
        ("0F0 0I0 0W0 0W0", "0W0 runs 2 times on rank 0, must run 1 time there"),
        ("0F0 0I0 0B0 0W0", "0B0 runs 1 time on rank 0, must run 0 times there"),
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
