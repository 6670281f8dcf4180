import dataclasses

import numpy as np
import pytest

from evenload.errors import ConfigError
from evenload.schedule.packflow import packflow_list
from evenload.schedule.simulate import simulate
from evenload.types.pipeline import PipelineTasks
from pipeline_cases import (
    caps,
    check_order,
    equal_packs,
    names_of,
    random_ranks,
    random_tasks,
    uniform_tasks,
    with_split,
)
from reference.list_schedule import list_schedule

UNLIMITED = 2**60


def least_peak(tasks: PipelineTasks, stage: int) -> int:
    """The least peak of any order of this stage's forwards and backwards: every lattice path, by recursion.

    State (forwards done, backwards done); a path's cost is its largest memory.
    """
    rows = tasks.held
    m_f, m_b = tasks.num_forward, tasks.num_backward
    best = np.full((m_f + 1, m_b + 1), UNLIMITED, dtype=np.int64)
    start = int(rows.static_bytes[stage])
    best[0, 0] = start
    for k in range(m_f + 1):
        for j in range(m_b + 1):
            held = start + rows.forward_kept_bytes[:k, stage].sum() - rows.backward_freed_bytes[:j, stage].sum()
            if k < m_f:
                peak = held + rows.forward_kept_bytes[k, stage] + rows.forward_temp_bytes[k, stage]
                best[k + 1, j] = min(best[k + 1, j], max(best[k, j], peak))
            if j < m_b and tasks.forwards_needed[j] <= k:
                peak = held + rows.backward_temp_bytes[j, stage]
                best[k, j + 1] = min(best[k, j + 1], max(best[k, j], peak))
    return int(best[m_f, m_b])


def random_rule(rng: np.random.Generator, tasks: PipelineTasks, cap: int) -> dict:
    return {
        "cap_bytes": caps(tasks, cap),
        "alternate": bool(rng.integers(2)),
        "lookahead": None if rng.random() < 0.5 else int(rng.integers(0, 4)),
    }


def test_alternate_and_lookahead_change_the_order():
    """One stage, everything ready at once: backward first, alternating, or limited to one pack ahead."""
    tasks = uniform_tasks([1, 1, 3, 3], 3, 1)
    options = {"cap_bytes": caps(tasks, UNLIMITED)}
    assert names_of(packflow_list(tasks, **options)) == ["0F0 0B0 0B1 0F1 0F2 0B2 0B3"]
    assert names_of(packflow_list(tasks, alternate=True, **options)) == ["0F0 0B0 0F1 0B1 0F2 0B2 0B3"]
    slow = dataclasses.replace(equal_packs(6, 2, p2p_s=50.0))
    for ahead in (0, 1, 2):
        actions = packflow_list(slow, cap_bytes=caps(slow, UNLIMITED), lookahead=ahead)
        warmup = names_of(actions)[0].split().index("0B0")
        assert warmup == 1 + 1 + ahead, "needed + the 1F1B word's run-ahead + lookahead"


@pytest.mark.parametrize(("split", "trials"), [(False, 2500), (True, 900)])
def test_no_cap_deadlocks_and_the_reference_agrees(split, trials):
    """Thousands of plans, caps from 0 up, one or several stages a rank, whole and split backwards."""
    rng, kinds = np.random.default_rng(0), np.zeros(4, int)
    for trial in range(trials):
        tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.4 else None, whole_seconds=trial % 2 == 0)
        tasks = with_split(tasks, rng) if split else tasks
        cap = int(rng.choice([0, rng.integers(1, 400), UNLIMITED]))
        rule = random_rule(rng, tasks, cap)
        actions = packflow_list(tasks, split=split, **rule)
        check_order(tasks, actions)
        kinds += np.bincount(actions.kind, minlength=4)
        if trial % 3 == 0:
            reference = list_schedule(tasks, split=split, **rule)
            for name in ("kind", "stage", "pack", "rank_offset"):
                assert np.array_equal(getattr(actions, name), getattr(reference, name)), name
                assert getattr(actions, name).dtype == getattr(reference, name).dtype
        if split and tasks.num_ranks == tasks.num_stages:
            # What whole backwards hold at least where the cap is 0: I and W add nothing to it.
            least = simulate(tasks, packflow_list(tasks, cap_bytes=caps(tasks, 0), lookahead=0)).peak_bytes
            assert (simulate(tasks, actions).peak_bytes <= np.maximum(cap, least)).all()
    assert kinds[1] > 1000
    assert (kinds[2:] > 1000).all() if split else not kinds[2:].any()


def test_peak_is_at_most_the_cap_or_what_any_order_must_hold():
    rng = np.random.default_rng(1)
    over_cap = bound_met = 0
    for _ in range(600):
        tasks = random_tasks(rng)
        cap = int(rng.integers(0, 500))
        peaks = simulate(tasks, packflow_list(tasks, **random_rule(rng, tasks, cap))).peak_bytes
        for stage in range(tasks.num_stages):
            limit = max(cap, least_peak(tasks, stage))
            assert peaks[stage] <= limit
            over_cap += peaks[stage] > cap
            bound_met += peaks[stage] == limit
    assert over_cap > 100
    assert bound_met > 100, "the bound was never tight: the test would pass for a looser schedule"


def test_bad_tasks_are_refused():
    tasks = equal_packs(2, 2)

    def run(changed: PipelineTasks, **options) -> None:
        packflow_list(changed, **{"cap_bytes": caps(changed, 0), **options})

    with pytest.raises(ValueError, match="backwards need 1 of 2 forward packs"):
        run(dataclasses.replace(tasks, forwards_needed=np.array([1, 1], dtype=np.int32)))
    with pytest.raises(ValueError, match="nan"):
        run(dataclasses.replace(tasks, forward_s=np.full((2, 2), np.nan)))
    with pytest.raises(ValueError, match=r"not in 0\.\.2"):
        run(dataclasses.replace(tasks, forwards_needed=np.array([1, 3], dtype=np.int32)))
    with pytest.raises(ConfigError, match=r"p2p_forward_s is float64\[3\]"):
        run(dataclasses.replace(tasks, p2p_forward_s=np.zeros(3)))
    with pytest.raises(ConfigError, match="expected contiguous float64"):
        run(dataclasses.replace(tasks, forward_s=np.zeros((2, 2), dtype=np.float32)))
    with pytest.raises(ConfigError, match="cap_bytes has shape"):
        run(tasks, cap_bytes=np.zeros(3, dtype=np.int64))
    with pytest.raises(ConfigError, match="lookahead is -1"):
        run(tasks, lookahead=-1)
