"""What observes a run: trackers and a caller's callbacks, called on rank 0."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evenload.cli.launch import print_error
from evenload.config.sections import Tracker
from evenload.errors import CallbackError, EvenloadError
from evenload.integrations.callback import Callback, EndReason, RunEnd, RunStart, TensorBoardLog, WandbLog
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.text import counted

_TRACKERS: dict[Tracker, Callable[[], Callback]] = {"wandb": WandbLog, "tensorboard": TensorBoardLog}


class CallbackCalls:
    """Calls trackers and callbacks during one start of a run, on rank 0; an exception of theirs stops the run."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        self._trainer = trainer
        self._callbacks: list[Callback] = []
        if trainer.mesh.rank == 0:
            self._callbacks = [*(_TRACKERS[name]() for name in trainer.config.log.to), *callbacks]
        self._begun: list[Callback] = []
        self.end_reason: EndReason = "failed"
        """Passed to `on_end`; changed where training ends in another way."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call `on_start`, and in the end `on_end`, whatever happens, once for each callback that has begun."""
        start = RunStart(
            config=self._trainer.config,
            model=self._trainer.model,
            layout=self._trainer.mesh.layout.describe(),
            num_ranks=self._trainer.mesh.num_ranks,
            steps_done=self._trainer.steps_done,
        )
        try:
            for one in self._callbacks:
                self._begun.append(one)
                self._call(one, "on_start", start)
            yield
        except BaseException:
            self._end("failed")
            raise
        self._end(self.end_reason)

    def step(self, report: StepReport) -> None:
        self._call_all("on_step", report)
        if report.validation is not None:
            self._call_all("on_validation", report.validation)
        if report.saved is not None:
            self.checkpoint(report.saved.path)

    def checkpoint(self, path: Path) -> None:
        self._call_all("on_checkpoint", path)

    def _end(self, reason: EndReason) -> None:
        end = RunEnd(steps_done=self._trainer.steps_done, reason=reason)
        while self._begun:
            try:
                self._call(self._begun.pop(0), "on_end", end)
            except EvenloadError as error:
                if reason != "failed":
                    self._end("failed")
                    raise
                print_error(f"warning: {error}")  # What fails now must not hide what failed first.

    def _call_all(self, name: str, argument: object) -> None:
        for one in self._callbacks:
            self._call(one, name, argument)

    def _call(self, one: Callback, name: str, argument: object) -> None:
        try:
            getattr(one, name)(argument)
        except EvenloadError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackError(
                f"callback {type(one).__name__}.{name} raised {type(error).__name__}: {error} ({last.filename}, line "
                f"{last.lineno}), after {counted(self._trainer.steps_done, 'step')}; training stops"
            ) from error
