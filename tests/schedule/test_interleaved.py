import pytest

from evenload.errors import ConfigError
from evenload.schedule.simulate import simulate
from evenload.schedule.static_schedules import interleaved_one_f_one_b
from evenload.schedule.validate import check_schedule
from pipeline_cases import equal_packs, names_of, uniform_tasks


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


def test_what_it_cannot_schedule_is_refused():
    with pytest.raises(ConfigError, match="use the list schedule"):
        interleaved_one_f_one_b(uniform_tasks([1, 1], 2, 2))
    with pytest.raises(ConfigError, match="round robin"):
        interleaved_one_f_one_b(equal_packs(2, 4, stage_to_rank=[0, 0, 1, 1]))
