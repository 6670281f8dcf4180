import dataclasses

import numpy as np
import pytest

from evenload.errors import ConfigError
from evenload.schedule.simulate import simulate
from evenload.schedule.static_schedules import one_f_one_b, zero_bubble_h1
from evenload.schedule.validate import check_schedule
from evenload.types.pipeline import PipelineTasks, SplitBackward
from pipeline_cases import equal_packs, names_of, random_tasks, uniform_tasks, with_split


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
        check_schedule(
            zero_bubble_h1(tasks),
            num_forward=tasks.num_forward,
            forwards_needed=tasks.forwards_needed.tolist(),
            stage_to_rank=tasks.stage_to_rank.tolist(),
        )


def test_what_it_cannot_schedule_is_refused():
    with pytest.raises(ConfigError, match="no split columns"):
        zero_bubble_h1(equal_packs(2, 2))
    with pytest.raises(ConfigError, match="one stage a rank"):
        zero_bubble_h1(with_split(equal_packs(2, 4, stage_to_rank=[0, 1, 0, 1])))
    empty = with_split(uniform_tasks([], 0, 2))
    assert names_of(zero_bubble_h1(empty)) == ["", ""]
