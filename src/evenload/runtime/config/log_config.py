"""`LogConfig`: the `[log]` section, what a run tells people while it goes on. Needs no torch."""

from importlib.util import find_spec
from typing import Literal

from evenload.errors import ConfigError, MissingPackageError
from evenload.types.base import Frozen

Tracker = Literal["wandb", "tensorboard"]


class LogConfig(Frozen):
    """What a run says and to whom, beside `metrics.jsonl`, which has every step.

    Args:
        to: also "wandb" (Weights & Biases) and "tensorboard" (event files in `output_dir`/tensorboard); a run that is
            resumed goes on in the same one. Needs `pip install 'evenload[wandb]'` or `'evenload[tensorboard]'`.
        project: of Weights & Biases.
        name: of the run there; default: the last part of `train.output_dir`.
        lines_every_s: a line about a step is shown at most once in so many seconds; the first two steps and the
            last always have one; 0 = every step has.
        profile_steps: [first, end): steps that torch's profiler records, one Chrome trace a process, in
            `output_dir`/profile. Steps that are profiled take longer.
    """

    to: tuple[Tracker, ...] = ()
    project: str = "evenload"
    name: str | None = None
    lines_every_s: float = 10.0
    profile_steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if len(set(self.to)) < len(self.to):
            raise ConfigError(f"log.to is {list(self.to)}, which names one twice; name each once")
        if self.lines_every_s < 0:
            raise ConfigError(f"log.lines_every_s is {self.lines_every_s}, must be 0 (every step) or more")
        if self.profile_steps is not None and not 0 <= self.profile_steps[0] < self.profile_steps[1]:
            raise ConfigError(
                f"log.profile_steps is {list(self.profile_steps)}; give the first step and the one behind the last, "
                "such as [3, 5] for steps 3 and 4"
            )

    def require_steps(self, steps: int) -> None:
        """`ConfigError` where a run of so many steps has none that is profiled."""
        if self.profile_steps is not None and self.profile_steps[0] >= steps:
            raise ConfigError(
                f"log.profile_steps is {list(self.profile_steps)}, but train.steps is {steps}, so the last step is "
                f"{steps - 1}; name steps before it"
            )


def require_trackers(config: LogConfig) -> None:
    """`MissingPackageError` where the package of a tracker is not installed here; imports none."""
    for name in config.to:
        if find_spec(name) is None:
            raise MissingPackageError(
                f"log.to names '{name}', whose package is not installed here; install it with: pip install "
                f"'evenload[{name}]', or leave it out of log.to"
            )
