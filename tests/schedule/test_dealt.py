"""Stages of several ranks, to which packs go in turn: 1F1B of such a pipeline, and the rules that it keeps."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError, InvalidPlanError, ScheduleDeadlockError
from evenload.schedule.registry import SCHEDULES
from evenload.schedule.simulate import check_schedule, simulate
from evenload.schedule.static_schedules import one_f_one_b
from evenload.types.pipeline import ActionColumns, PackBytes, PipelineTasks
from pipeline_cases import check_order, columns_of, equal_packs
from reference.simulation import reference_simulation


def replicated_tasks(devices: list[int], num_packs: int, seed: int | None = None) -> PipelineTasks:
    """Packs on stages of so many ranks; equal ones, or of random seconds and bytes."""
    firsts = [0, *itertools.accumulate(devices[:-1])]
    tasks = equal_packs(num_packs, len(devices), stage_to_rank=firsts)
    held = dataclasses.replace(tasks.held, static_bytes=np.full(sum(devices), 100, np.int64))
    if seed is None:
        return dataclasses.replace(tasks, held=held)
    rng, shape = np.random.default_rng(seed), (num_packs, len(devices))
    columns = {name: rng.integers(0, 50, shape) for name in PackBytes.pack_columns()}
    seconds = {name: rng.lognormal(0, 1, shape) * (rng.random(shape) < 0.9) for name in ("forward_s", "backward_s")}
    hops = {name: rng.lognormal(0, 1, num_packs) for name in ("p2p_forward_s", "p2p_backward_s")}
    return dataclasses.replace(tasks, held=dataclasses.replace(held, **columns), **seconds, **hops)


def test_one_two_one_by_hand():
    """tF = 1, tB = 2 on narrow stages; the middle stage takes twice as long, and its two ranks share the packs."""
    tasks = replicated_tasks([1, 2, 1], 4)
    actions = one_f_one_b(tasks)
    assert actions.to_schedule().grid().splitlines() == [
        "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "rank 1: 1F0 1F2 1B0 1B2",
        "rank 2: 1F1 1F3 1B1 1B3",
        "rank 3: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    slow = np.array([1.0, 2.0, 1.0])
    tasks = dataclasses.replace(tasks, forward_s=tasks.forward_s * slow, backward_s=tasks.backward_s * slow)
    # rank 3 is busy from 3 to 15 without a gap; then 1B3 takes 4 and 0B3 takes 2.
    assert simulate(tasks, actions).makespan_s == 3 + 4 * 3 + 4 + 2


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 14), st.integers(0, 2**31))
def test_every_dealt_schedule_runs_to_its_end_as_core_and_graph_say(devices, num_packs, seed):
    """Whatever packs take: no deadlock, the core and the explicit graph agree to the bit."""
    tasks = replicated_tasks(devices, num_packs, seed)
    actions = one_f_one_b(tasks)
    check_order(tasks, actions)
    result, expected = simulate(tasks, actions), reference_simulation(tasks, actions)
    assert np.array_equal(result.start_s, expected.start_s)
    assert np.array_equal(result.end_s, expected.end_s)
    assert np.array_equal(result.peak_bytes, expected.peak_bytes)


@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(2, 9), st.integers(0, 2**31))
def test_core_and_graph_agree_on_orders_that_wait_for_each_other(devices, num_packs, seed):
    """Backwards of every rank moved forward at random: some such orders end, some do not."""
    tasks, rng = replicated_tasks(devices, num_packs, seed), np.random.default_rng(seed)
    usual, rows = one_f_one_b(tasks), []
    for rank in range(tasks.num_ranks):
        own = usual.of_rank(rank)
        packs = np.unique(usual.pack[own])
        count = len(packs)
        # A backward comes behind so many forwards: it needs its own before it, no more.
        behind = np.maximum.accumulate(np.maximum(rng.integers(0, count + 1, count), np.arange(count) + 1))
        order = np.argsort(np.concatenate([np.arange(count), behind - 0.5]), kind="stable")
        rows.append((np.repeat([0, 1], count)[order], usual.stage[own], np.tile(packs, 2)[order]))
    actions = ActionColumns.of_ranks(rows)
    ends = reference_simulation(tasks, actions).done.sum() == len(actions.kind)
    if ends:
        simulate(tasks, actions)
    else:
        with pytest.raises(ScheduleDeadlockError, match="waits for"):
            simulate(tasks, actions)


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0", "1F1 1B1")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0F1 0B0 0B1", "1F1 1B1", "1F0 1B0"), "1F0 runs 0 times on rank 1, must run 1 time there"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0", ""), "1F1 runs 0 times on rank 2, must run 1 time there"),
        (("0F0 0F1 0B0 0B1", "1F0 1F0 1B0", "1F1 1B1"), "1F0 runs 2 times on rank 1, must run 1 time there"),
        (("0F0 0F1 0B0 0B1", "1B0 1F0", "1F1 1B1"), "1B0 <-- waits for 1F0"),
        (("0F0 0B0 0B1 0F1", "1F0 1B0", "1F1 1B1"), "0B1 <-- waits for 0F1"),
        (("0F0 0F1 0B0 0B1", "0F0 1B0", "1F1 1B1"), "1F0 runs 0 times on rank 1, must run 1 time there"),
    ],
)
def test_faults_are_named(rows, message):
    arguments = {"num_forward": 2, "forwards_needed": [1, 2], "stage_to_rank": [0, 1], "num_ranks": 3}
    check_schedule(columns_of(*GOOD), **arguments)
    with pytest.raises(InvalidPlanError, match=message):
        check_schedule(columns_of(*rows), **arguments)


def test_other_schedules_and_cut_documents_are_refused():
    tasks = replicated_tasks([1, 2], 4)
    for rule in SCHEDULES.values():
        if rule.name != "1f1b" and not rule.splits_backward:
            with pytest.raises(ConfigError, match="it knows one rank a stage; use 1f1b"):
                rule.actions(tasks, None)
    cut = dataclasses.replace(tasks, forwards_needed=np.array([2, 2, 3, 4], np.int32))
    with pytest.raises(ConfigError, match="every backward pack has to be a forward pack"):
        one_f_one_b(cut)
