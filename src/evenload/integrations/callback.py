"""`Callback`: code of one's own that is told how a training run goes.

Callbacks run in the process of rank 0, between two steps, while all other processes wait for it: what takes long there
keeps training waiting. An exception in one stops the run (`CallbackError`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evenload.config.train_config import TrainConfig
from evenload.types.model import ModelSpec
from evenload.types.validation import Validation

if TYPE_CHECKING:  # needs torch, and naming a callback does not
    from evenload.runtime.step_metrics import StepReport

EndReason = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunStart:
    """A run, or a start of it.

    Args:
        config: as resolved.
        model: as the cost model sees it.
        layout: in which training begins, such as "dp=2 pp=2".
        num_ranks: processes of the run.
        steps_done: before this start; 0 = the run begins.
    """

    config: TrainConfig
    model: ModelSpec
    layout: str
    num_ranks: int
    steps_done: int

    @property
    def output_dir(self) -> Path:
        """Where the run's files are."""
        return Path(self.config.train.output_dir)


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How this start of a run ended.

    Args:
        steps_done: in all.
        reason: "finished" all steps, "stopped" by a signal with a checkpoint, or "failed" with an error.
    """

    steps_done: int
    reason: EndReason


class Callback:
    """Does nothing; override what you want to be told. One object sees `on_start`, then all else, then `on_end`."""

    def on_start(self, run: RunStart) -> None:
        """Training begins, or goes on."""

    def on_step(self, report: "StepReport") -> None:
        """A step was trained; `report.row` is its row of metrics.jsonl, `report.plan` what was planned,
        `report.measured` the timeline of all ranks."""

    def on_validation(self, validation: Validation) -> None:
        """The validation data was gone through after a step, of which `on_step` has told; `validation.metrics()` has
        its losses by names that stay."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is complete. One that is written beside training is told after the step during which it
        became so."""

    def on_end(self, end: RunEnd) -> None:
        """Training ended here, however it did; once for every `on_start`."""
