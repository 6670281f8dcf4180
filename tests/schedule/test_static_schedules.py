"""Static orders: their two sequences, 1F1B, injected forwards, interleaved 1F1B and ZB-H1."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenload.errors import ConfigError
from evenload.schedule.packflow import keep_counts, packflow_static
from evenload.schedule.schedule_rule import static_order
from evenload.schedule.simulate import simulate
from evenload.schedule.static_schedules import interleaved_one_f_one_b, one_f_one_b, zero_bubble_h1
from evenload.types.pipeline import ActionColumns, PipelineTasks, SplitBackward
from pipeline_cases import check_order, equal_packs, names_of, random_ranks, random_tasks, uniform_tasks, with_split
from reference.simulation import reference_simulation


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
        check_order(tasks, static_order(tasks, counts, warmup))


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
    with pytest.raises(ConfigError, match="must fall or stay"):
        static_order(tasks, np.array([2, 2, 3]), np.array([0, 1]))


def test_injected_pack_of_slimpack_figure_9():
    """Five packs each way; the backward of pack 0 needs two forwards, pack 1 nothing new."""
    needed = np.array([2, 2, 4, 4, 5], dtype=np.int32)
    kind = one_f_one_b(uniform_tasks(needed.tolist(), 5, 1)).kind
    assert np.cumsum(kind == 0)[kind == 1].tolist() == [2, 2, 4, 4, 5], "without injection backwards catch up"
    assert keep_counts(needed, 5).tolist() == [2, 3, 4, 5, 5]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(12, 15))
def test_keep_follows_its_recurrence(needed, num_forward):
    expected = [needed[0]]
    for d in needed[1:]:
        expected.append(min(num_forward, max(d, expected[-1] + 1)))
    assert keep_counts(np.array(needed, dtype=np.int32), num_forward).tolist() == expected


def virtual_packs(num_packs: int, num_ranks: int, virtual: int):
    ranks = [stage % num_ranks for stage in range(num_ranks * virtual)]
    return equal_packs(num_packs, len(ranks), stage_to_rank=ranks)


def test_order_of_two_ranks_with_two_stages_each():
    assert names_of(interleaved_one_f_one_b(virtual_packs(4, 2, 2))) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_equal_packs_have_the_closed_form(num_ranks, virtual):
    """(m v + R - 1) (tF + tB) with tF, tB of one virtual stage: a bubble v times smaller than 1F1B's; also where the
    number of packs is no multiple of the ranks, and of fewer than R packs each passes all stages behind the other."""
    for num_packs in range(1, 3 * num_ranks + 2):
        tasks = virtual_packs(num_packs, num_ranks, virtual)
        actions = interleaved_one_f_one_b(tasks)
        check_order(tasks, actions)
        expected = 3 * (max(num_packs, num_ranks) * virtual + min(num_packs, num_ranks) - 1)
        assert simulate(tasks, actions).makespan_s == expected


def test_what_interleaved_1f1b_cannot_schedule_is_refused():
    with pytest.raises(ConfigError, match="use the list schedule"):
        interleaved_one_f_one_b(uniform_tasks([1, 1], 2, 2))
    with pytest.raises(ConfigError, match="round robin"):
        interleaved_one_f_one_b(equal_packs(2, 4, stage_to_rank=[0, 0, 1, 1]))


def split_packs(num_packs: int, num_stages: int, forward_s: float, input_s: float, weight_s: float) -> PipelineTasks:
    """Equal packs of which W gives all bytes back."""
    tasks = equal_packs(num_packs, num_stages, forward_s=forward_s, backward_s=input_s + weight_s)
    shape = tasks.backward_s.shape
    split = SplitBackward(
        input_s=np.full(shape, input_s),
        weight_s=np.full(shape, weight_s),
        input_freed_bytes=np.zeros(shape, np.int64),
        input_temp_bytes=tasks.held.backward_temp_bytes,
        weight_freed_bytes=tasks.held.backward_freed_bytes,
    )
    return dataclasses.replace(tasks, split=split)


def test_order_of_three_stages():
    assert names_of(zero_bubble_h1(split_packs(4, 3, 1.0, 1.0, 1.0))) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("forward_s", "input_s", "weight_s"),
    [(1.0, 1.0, 1.0), (1.0, 1.25, 0.75), (1.0, 1.5, 0.5), (2.0, 1.0, 0.5), (1.0, 2.0, 1.0), (1.0, 0.75, 1.25)],
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equal_packs_have_the_published_bubble(num_stages, forward_s, input_s, weight_s, groups):
    """(P - 1)(tF + tI - tW) of Table 1 for tW <= tI; a longer W is not hidden beyond tI."""
    num_packs = groups * num_stages
    tasks = split_packs(num_packs, num_stages, forward_s, input_s, weight_s)
    work_s = num_packs * (forward_s + input_s + weight_s)
    expected = work_s + (num_stages - 1) * (forward_s + max(0.0, input_s - weight_s))
    actions = zero_bubble_h1(tasks)
    assert simulate(tasks, actions).makespan_s == expected
    whole = simulate(tasks, one_f_one_b(tasks))
    assert whole.makespan_s == work_s + (num_stages - 1) * (forward_s + input_s + weight_s)


def test_any_packs_are_complete_and_executable():
    rng = np.random.default_rng(0)
    for _ in range(100):
        tasks = with_split(random_tasks(rng), rng)
        check_order(tasks, zero_bubble_h1(tasks))


def test_what_zb_h1_cannot_schedule_is_refused():
    with pytest.raises(ConfigError, match="no split columns"):
        zero_bubble_h1(equal_packs(2, 2))
    with pytest.raises(ConfigError, match="one stage a rank"):
        zero_bubble_h1(with_split(equal_packs(2, 4, stage_to_rank=[0, 1, 0, 1])))
    empty = with_split(uniform_tasks([], 0, 2))
    assert names_of(zero_bubble_h1(empty)) == ["", ""]
