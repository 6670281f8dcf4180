import pytest

from evenload.errors import InvalidPlanError, ScheduleDeadlockError
from evenload.schedule.validate import check_schedule
from pipeline_cases import columns_of

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def check(*rows: str, needed=(1, 2), ranks=(0, 1)) -> None:
    check_schedule(columns_of(*rows), num_forward=2, forwards_needed=needed, stage_to_rank=ranks)


def test_good_schedule_passes_as_columns_and_as_objects():
    check(*GOOD)
    check_schedule(columns_of(*GOOD).to_schedule(), num_forward=2, forwards_needed=[1, 2], stage_to_rank=[0, 1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0F1 0B0", GOOD[1]), "stage 0 runs 1 of 2 backward packs; 0B1 is missing on rank 0"),
        (("0F0 0F0 0B0 0B1", GOOD[1]), "rank 0 action 1 is 0F0 where 0F1 is next"),
        (("0F1 0F0 0B0 0B1", GOOD[1]), "rank 0 action 0 is 0F1 where 0F0 is next"),
        (("0F0 0F1 0B0 0B1 0B2", GOOD[1]), "0B2 where no further one is next"),
        (("0F0 0F1 0B0 1B0 0B1", GOOD[1]), r"rank 0 action 3 is 1B0, but this rank runs stages \[0\]"),
        (("0F0 0F1 0B0 0W0 0B1", GOOD[1]), "0W0, but 0I0 does not stand before it"),
        (("0B0 0F0 0F1 0B1", GOOD[1]), r"0B0, but its documents need forwards 0\.\.0 and only 0"),
        ((GOOD[0],), "the schedule has 1 ranks, stages are on 2"),
    ],
)
def test_broken_schedules_are_named(rows, message):
    with pytest.raises(InvalidPlanError, match=message):
        check(*rows)


def test_complete_schedule_in_a_circle_is_a_deadlock():
    with pytest.raises(ScheduleDeadlockError, match="0B0 <-- waits for 1B0"):
        check("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")


def test_counts_out_of_range_are_refused():
    with pytest.raises(InvalidPlanError, match=r"must lie in 0\.\.2"):
        check(*GOOD, needed=(1, 3))
