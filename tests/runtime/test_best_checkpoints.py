"""Which checkpoints stay for their validation losses: ties, passes that are made again, saves that fail."""

import math

import pytest

from evenload.errors import ConfigError
from evenload.runtime.checkpoint.checkpoint import _require_same_state
from evenload.runtime.checkpoint.directory import BestPass, with_pass

SAVED = (BestPass(steps_done=2, loss=1.0), BestPass(steps_done=4, loss=2.0))


def steps(best: tuple[BestPass, ...]) -> list[int]:
    return [one.steps_done for one in best]


@pytest.mark.parametrize(
    ("steps_done", "loss", "keep", "expected", "is_best"),
    [
        (6, 0.5, 2, [6, 2, 4], True),
        (6, 1.0, 2, [2, 6, 4], True),  # of equal losses the earlier counts
        (6, 1.0, 1, [2], False),
        (6, 2.0, 2, [2, 4], False),
        (6, 3.0, 3, [2, 4, 6], True),
        (6, math.nan, 2, [2, 4], False),
        (6, None, 2, [2, 4], False),
        (2, 3.0, 2, [4, 2], True),  # made again, with another loss
        (2, None, 2, [4], False),
    ],
)
def test_a_pass_among_the_best_stands_before_the_one_that_it_drives_out(steps_done, loss, keep, expected, is_best):
    best, reported = with_pass(SAVED, steps_done, loss, keep)
    assert (steps(best), reported) == (expected, is_best)


@pytest.mark.parametrize(
    ("wanted", "saved", "cause"),
    [
        (["exp_avg", "master"], ["exp_avg"], "another model.dtype"),
        (["exp_avg"], ["average", "exp_avg"], "train.ema_decay is set in one"),
        (["momentum"], ["exp_avg"], "another optimizer.name"),
    ],
)
def test_a_checkpoint_of_other_state_is_refused_with_the_setting_that_differs(tmp_path, wanted, saved, cause):
    ours, theirs = ([f"optimizer.w.{kind}" for kind in kinds] for kinds in (wanted, saved))
    with pytest.raises(ConfigError) as refused:
        _require_same_state(tmp_path, ours, ["model.w", *theirs])
    causes = ["another model.dtype", "train.ema_decay is set in one", "another optimizer.name"]
    assert [one for one in causes if one in str(refused.value)] == [cause]
