import numpy as np
import pytest

from evenload.errors import ConfigError
from evenload.schedule.critical_path import split_bubble
from evenload.schedule.packflow import packflow_list
from evenload.schedule.simulate import simulate
from evenload.schedule.static_schedules import interleaved_one_f_one_b
from evenload.schedule.validate import check_schedule
from pipeline_cases import equal_packs, names_of, uniform_tasks, with_split


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
        check_schedule(
            actions,
            num_forward=tasks.num_forward,
            forwards_needed=tasks.forwards_needed.tolist(),
            stage_to_rank=tasks.stage_to_rank.tolist(),
        )
        expected = 3 * (max(num_packs, num_ranks) * virtual + min(num_packs, num_ranks) - 1)
        assert simulate(tasks, actions).makespan_s == expected


@pytest.mark.parametrize(("num_ranks", "virtual"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_a_rank_idles_as_published(num_ranks, virtual):
    """(R - 1)(f + b) / v of every rank, f and b of one pack on all v stages of a rank (Narayanan et al. 2021, §2.2)."""
    f_s, b_s = 1.0 * virtual, 2.0 * virtual
    tasks = virtual_packs(3 * num_ranks, num_ranks, virtual)
    actions = interleaved_one_f_one_b(tasks)
    bubble = split_bubble(tasks, actions, simulate(tasks, actions))
    assert sum(bubble) / num_ranks == pytest.approx((num_ranks - 1) * (f_s + b_s) / virtual)
    assert bubble.stage_imbalance_s == bubble.imbalance_s == bubble.p2p_s == 0


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_list_schedule_of_virtual_stages_is_as_short_and_splitting_shortens_it(num_ranks):
    tasks = with_split(virtual_packs(4 * num_ranks, num_ranks, 2))
    cap = np.full(num_ranks, 2**60)
    interleaved_s = simulate(tasks, interleaved_one_f_one_b(tasks)).makespan_s
    rules = [{"alternate": a, "lookahead": ahead} for a in (False, True) for ahead in (None, 0, num_ranks)]
    whole_s = min(simulate(tasks, packflow_list(tasks, cap_bytes=cap, **rule)).makespan_s for rule in rules)
    split_s = simulate(tasks, packflow_list(tasks, cap_bytes=cap, split=True)).makespan_s
    assert whole_s <= 1.1 * interleaved_s
    assert split_s < whole_s
    assert split_s >= 3 * 8 * num_ranks + num_ranks - 1, "the last stage cannot start earlier"


def test_what_it_cannot_schedule_is_refused():
    with pytest.raises(ConfigError, match="use the list schedule"):
        interleaved_one_f_one_b(uniform_tasks([1, 1], 2, 2))
    with pytest.raises(ConfigError, match="round robin"):
        interleaved_one_f_one_b(equal_packs(2, 4, stage_to_rank=[0, 0, 1, 1]))
