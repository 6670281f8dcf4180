"""Learning rates of schedules, and what is refused about them."""

import math

import pytest

from evenload.config.sections import OptimizerConfig
from evenload.errors import ConfigError


def rates(steps: int | None, upto: int | None = None, **settings: object) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    config.require_steps(steps)
    return [config.rate(step, steps) for step in range(upto or steps or 0)]


def test_linear_falls_from_the_end_of_warm_up_to_its_final_ratio():
    assert rates(6, decay="linear", warmup_steps=2, final_ratio=0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])


@pytest.mark.parametrize(
    ("shape", "falling"),
    [
        (None, [1.0, 0.75, 0.5, 0.25]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125)]),
        ("sqrt", [1.0, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
    ],
)
def test_wsd_warms_up_stays_and_falls_in_its_last_steps(shape, falling):
    result = rates(10, decay="wsd", warmup_steps=2, decay_steps=4, decay_shape=shape, final_ratio=0.0)
    assert result == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *falling])


@pytest.mark.parametrize(
    ("steps", "settings", "message"),
    [
        (None, {"decay": "linear"}, "decay is 'linear', which ends at train.steps, but train.steps is not set"),
        (None, {"decay": "wsd"}, "decay is 'wsd', which ends at train.steps"),
        (10, {"decay": "wsd", "warmup_steps": 6, "decay_steps": 5}, "warmup_steps 6 and the 5 steps .* train.steps 10"),
        (10, {"decay": "wsd", "decay_steps": 0}, "decay_steps is 0"),
        (10, {"decay": "cosine", "decay_steps": 5}, "decay_steps is 5, which optimizer.decay = 'cosine' does not read"),
        (10, {"decay": "wsd", "decay_shape": "exponential", "final_ratio": 0.0}, "final_ratio 0, which it never"),
        (10, {"final_ratio": 1.5}, "final_ratio is 1.5"),
    ],
)
def test_settings_that_make_no_schedule_are_refused(steps, settings, message):
    with pytest.raises(ConfigError, match=message):
        rates(steps, **settings)
