"""`TensorBoardLog`: a run's steps as event files of TensorBoard, in `output_dir`/tensorboard.

A start after a resume adds a file, which tells TensorBoard to forget the steps that are trained again.
"""

from typing import TYPE_CHECKING, Any

from evenload.integrations.callback import Callback, RunEnd, RunStart
from evenload.integrations.logged_metrics import reported_metrics

if TYPE_CHECKING:
    from evenload.runtime.step_metrics import StepReport

DIRECTORY = "tensorboard"
_FLUSH_EVERY_S = 10


class TensorBoardLog(Callback):
    """Event files of one start of a run."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_start(self, run: RunStart) -> None:
        """Open a file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        directory = run.output_dir / DIRECTORY
        if run.steps_done == 0 and directory.is_dir():
            # The run begins anew in its directory, as its metrics do.
            for file in directory.glob("events.out.tfevents.*"):
                file.unlink()
        self._writer = SummaryWriter(str(directory), purge_step=run.steps_done or None, flush_secs=_FLUSH_EVERY_S)

    def on_step(self, report: "StepReport") -> None:
        """Its row."""
        self._tell(reported_metrics(report), int(report.row["step"] or 0))

    def on_end(self, end: RunEnd) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _tell(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
