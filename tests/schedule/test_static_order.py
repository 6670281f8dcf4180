import numpy as np
import pytest

from evenload.errors import ConfigError
from evenload.schedule.packflow import packflow_static
from evenload.schedule.schedule_rule import static_order
from evenload.schedule.static_schedules import one_f_one_b
from evenload.schedule.validate import check_schedule
from evenload.types.pipeline import ActionColumns, PipelineTasks
from pipeline_cases import equal_packs, names_of, random_ranks, random_tasks, uniform_tasks
from reference.simulation import reference_simulation


def check(tasks: PipelineTasks, actions: ActionColumns) -> None:
    check_schedule(
        actions,
        num_forward=tasks.num_forward,
        forwards_needed=tasks.forwards_needed.tolist(),
        stage_to_rank=tasks.stage_to_rank.tolist(),
    )


def test_whole_documents_give_plain_1f1b():
    assert names_of(one_f_one_b(equal_packs(4, 3))) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_sliced_document_catches_up_or_injects():
    """Document 0 in forward packs 0, 1 and backward packs 0, 1; document 1 in pack 2 of both."""
    tasks = uniform_tasks([2, 2, 3], 3, 2)
    assert names_of(packflow_static(tasks, inject=False))[1] == "1F0 1F1 1B0 1B1 1F2 1B2"
    assert names_of(packflow_static(tasks, inject=True))[1] == "1F0 1F1 1B0 1F2 1B1 1B2"
    assert names_of(packflow_static(tasks, inject=False))[0] == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_any_f_and_w_within_the_conditions_never_deadlock():
    rng = np.random.default_rng(0)
    for _ in range(1500):
        tasks = random_tasks(rng, ranks=random_ranks(rng) if rng.random() < 0.3 else None)
        least = np.maximum.accumulate(tasks.forwards_needed.astype(np.int64))
        counts = np.maximum.accumulate(rng.integers(least, tasks.num_forward + 1))
        warmup = np.sort(rng.integers(0, 12, tasks.num_stages))[::-1].astype(np.int64)
        check(tasks, static_order(tasks, counts, warmup))


def word_without_checks(needed: list[int], num_forward: int, warmup: list[int]) -> ActionColumns:
    """The static order of any f = D and w, also of those that `static_order` refuses."""
    kinds, packs = [], []
    for w in warmup:
        done = 0
        row = []
        for j, d in enumerate(needed):
            until = min(num_forward, max(done, d + w))
            row += [(0, k) for k in range(done, until)] + [(1, j)]
            done = until
        row += [(0, k) for k in range(done, num_forward)]
        kinds.append([kind for kind, _ in row])
        packs.append([pack for _, pack in row])
    per_rank = num_forward + len(needed)
    return ActionColumns(
        kind=np.array(kinds, dtype=np.uint8).ravel(),
        stage=np.repeat(np.arange(len(warmup), dtype=np.int32), per_rank),
        pack=np.array(packs, dtype=np.int32).ravel(),
        rank_offset=np.arange(len(warmup) + 1, dtype=np.int64) * per_rank,
    )


def test_rising_warmup_is_refused_and_would_deadlock():
    """The condition on w is needed, and the replay sees what breaks without it."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        num_stages = int(rng.integers(2, 8))
        num_packs = num_stages + 10
        warmup = rng.integers(0, 8, num_stages)
        tasks = equal_packs(num_packs, num_stages)
        needed = tasks.forwards_needed.tolist()
        rises = bool((np.diff(warmup) > 0).any())
        actions = word_without_checks(needed, num_packs, warmup.tolist())
        if rises:
            with pytest.raises(ConfigError, match="must fall or stay"):
                static_order(tasks, tasks.forwards_needed.astype(np.int64), warmup)
        assert (reference_simulation(tasks, actions).done.sum() == len(actions.kind)) != rises


def test_bad_counts_are_refused():
    tasks = uniform_tasks([2, 2, 3], 3, 2)
    warmup = np.array([1, 0])
    for counts, text in (([1, 2, 3], r"\[0\] = 1"), ([3, 2, 3], r"\[1\] = 2"), ([2, 2, 4], r"\[2\] = 4")):
        with pytest.raises(ConfigError, match=text):
            static_order(tasks, np.array(counts), warmup)
    with pytest.raises(ConfigError, match="3 backward packs"):
        static_order(tasks, np.array([2]), warmup)
