"""A machine that does something else while it is timed is noticed."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from evenload.calibrate.fit import CoreWaits, spread_of_repeats
from evenload.cost.coefficients import Noise


def _keep_busy(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def _waited_share(core: int, demand: float) -> float:
    """Of 0.5 s of computing on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        waits, from_s = CoreWaits(demand), time.perf_counter()
        while time.perf_counter() - from_s < 0.5:
            sum(range(1000))
        return waits.share()
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the system does not count how long threads wait")
def test_a_neighbour_on_the_same_core_is_seen_and_the_runs_own_ranks_are_not() -> None:
    """Two processes share a core evenly: half of the time is waited, unless the run itself wants two threads a core."""
    core = min(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    neighbours = [context.Process(target=_keep_busy, args=(core,), daemon=True) for _ in range(3)]
    for neighbour in neighbours:
        neighbour.start()
    try:
        share = _waited_share(core, demand=1.0)
        own = _waited_share(core, demand=100.0)
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.join()
    assert share > 0.3
    assert Noise(waited_share=share, spread=0.0).is_noisy
    assert own < 0.1


def test_repeats_that_differ_are_noisy() -> None:
    even = spread_of_repeats([[1.0, 1.1, 1.05], [4.0, 4.2, 4.1]])
    uneven = spread_of_repeats([[1.0, 3.0, 2.0], [4.0, 9.0, 8.0]])
    assert not Noise(waited_share=0.0, spread=even).is_noisy
    assert Noise(waited_share=0.0, spread=uneven).is_noisy
    assert Noise(waited_share=0.0, spread=uneven).size > Noise(waited_share=0.05, spread=even).size
    assert "3% of the time" in Noise(waited_share=0.03, spread=0.0).describe()
