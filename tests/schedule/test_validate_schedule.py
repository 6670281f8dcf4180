"""What the check of schedules, the simulator and plain graphs call broken or stuck."""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.schedule.packflow import packflow_list
from evenload.schedule.simulate import check_schedule, simulate
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import check_order, columns_of, names_of, random_ranks, random_tasks, with_split
from reference.simulation import reference_simulation

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def check(*rows: str, needed=(1, 2), ranks=(0, 1)) -> None:
    check_schedule(columns_of(*rows), num_forward=2, forwards_needed=needed, stage_to_rank=ranks)


def test_good_schedule_passes_as_columns_and_as_objects():
    check(*GOOD)
    check_schedule(columns_of(*GOOD).to_schedule(), num_forward=2, forwards_needed=[1, 2], stage_to_rank=[0, 1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0F1 0B0", GOOD[1]), "0B1 runs 0 times on rank 0, must run 1 time there"),
        (("0F0 0F0 0B0 0B1", GOOD[1]), "0F0 runs 2 times on rank 0, must run 1 time there"),
        (("0F1 0F0 0B0 0B1", GOOD[1]), "rank 0 action 0: pack 1 of stage 0 where 0 is next"),
        (("0F0 0F1 0B0 0B1 0B2", GOOD[1]), "0B2 runs 1 time on rank 0, must run 0 times there"),
        (("0F0 0F1 0B0 1B0 0B1", GOOD[1]), "rank 0 action 3: stage 1 is not on this rank"),
        (("0F0 0F1 0B0 0W0 0B1", GOOD[1]), "0W0 runs 1 time on rank 0, must run 0 times there"),
        (("0B0 0F0 0F1 0B1", GOOD[1]), "0B0 <-- waits for 0F0"),
        ((GOOD[0],), "the schedule has 1 ranks, stages are on 2"),
    ],
)
def test_broken_schedules_are_named(rows, message):
    with pytest.raises(InvalidPlanError, match=message):
        check(*rows)


def test_complete_schedule_in_a_circle_is_a_deadlock():
    with pytest.raises(ScheduleDeadlockError, match="0B0 <-- waits for 1B0"):
        check("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")


def is_complete(actions: ActionColumns, tasks: PipelineTasks) -> bool:
    """Every pack once, in order, on the rank of each stage; backwards behind their forwards, W behind its I."""
    rows = actions.to_schedule().ranks
    for stage, rank in enumerate(tasks.stage_to_rank.tolist()):
        own = [action for action in rows[rank] if action.stage == stage]
        forwards = [action.pack for action in own if action.kind == "F"]
        backwards = [action.pack for action in own if action.kind in "BI"]
        if forwards != list(range(tasks.num_forward)) or backwards != list(range(tasks.num_backward)):
            return False
        for at, action in enumerate(own):
            before = [(other.kind, other.pack) for other in own[:at]]
            if action.kind in "BI" and sum(kind == "F" for kind, _ in before) < tasks.forwards_needed[action.pack]:
                return False
            if action.kind == "W" and (("I", action.pack) not in before or ("W", action.pack) in before):
                return False
        if sum(action.kind == "W" for action in own) != sum(action.kind == "I" for action in own):
            return False
    return all(tasks.stage_to_rank[action.stage] == rank for rank, row in enumerate(rows) for action in row)


def test_refused_are_those_with_a_fault_or_in_a_circle():
    """Good schedules and ones with actions swapped, dropped, doubled or renamed, with and without split backwards."""
    rng = np.random.default_rng(0)
    verdicts = dict.fromkeys(("runs", "stuck", "faulty"), 0)
    for _ in range(600):
        tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.4 else None)
        split = bool(rng.integers(2))
        tasks = with_split(tasks, rng) if split else tasks
        actions = packflow_list(tasks, cap_bytes=np.full(tasks.num_ranks, 2**60), split=split)
        rows = [row.split() for row in names_of(actions)]
        row = rows[int(rng.integers(len(rows)))]
        change = rng.integers(5)
        if change and row:
            i, j = (int(rng.integers(len(row))) for _ in range(2))
            if change == 1:
                row[i], row[j] = row[j], row[i]
            elif change == 2:
                row.pop(i)
            elif change == 3:
                row.insert(j, row[i])
            else:
                row[i] = row[i].translate(str.maketrans("FBIW", "".join(rng.permutation(list("FBIW")))))
        changed = columns_of(*(" ".join(row) for row in rows))

        try:
            check_order(tasks, changed)
            verdict = "runs"
        except ScheduleDeadlockError:
            verdict = "stuck"
        except InvalidPlanError:
            verdict = "faulty"
        if is_complete(changed, tasks):
            runs = reference_simulation(tasks, changed).done.sum() == len(changed.kind)
            assert verdict == ("runs" if runs else "stuck")
        else:
            # A backward or W that stands before what it needs on its own rank is stuck.
            assert verdict != "runs"
        verdicts[verdict] += 1
    assert min(verdicts["runs"], verdicts["faulty"]) > 100, "the test below has many that are stuck"


def random_interleaving(rng: np.random.Generator, tasks: PipelineTasks) -> ActionColumns:
    """The static order with noise in its keys: every rank keeps pack order per stage and direction."""
    rows, noise = [], rng.choice([0.5, 1.0, 2.0, 8.0])
    needed = np.maximum.accumulate(tasks.forwards_needed).tolist()
    for rank in range(tasks.num_ranks):
        keys = []
        for stage in np.flatnonzero(tasks.stage_to_rank == rank).tolist():
            ahead = tasks.num_stages - 1 - stage
            keys += [(k - ahead + noise * rng.random(), 0, stage) for k in range(tasks.num_forward)]
            keys += [(f - 0.5 + noise * rng.random(), 1, stage) for f in needed]
        order, seen = [key[1:] for key in sorted(keys)], Counter()
        packs = []
        for name in order:
            packs.append(seen[name])
            seen[name] += 1
        rows.append(([kind for kind, _ in order], [stage for _, stage in order], packs))
    return ActionColumns.of_ranks(rows)


def test_simulator_check_and_graph_agree_on_what_deadlocks():
    rng = np.random.default_rng(0)
    circles = 0
    for _ in range(800):
        tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.3 else None)
        actions = random_interleaving(rng, tasks)
        circle = reference_simulation(tasks, actions).done.sum() < len(actions.kind)
        circles += circle
        with pytest.raises(ScheduleDeadlockError, match="waits for") if circle else nullcontext():
            simulate(tasks, actions)
        with pytest.raises(InvalidPlanError) if circle else nullcontext():
            check_order(tasks, actions)
    assert 100 < circles < 700, "both outcomes must be frequent"
