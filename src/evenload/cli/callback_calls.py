"""`CallbackCalls`: trackers and a caller's callbacks are told of a run, on rank 0; an exception of theirs is told in
words and stops the run."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from evenload.config.sections import LogConfig, Tracker, require_trackers
from evenload.errors import CallbackError, EvenloadError
from evenload.integrations.callback import Callback, EndReason, RunEnd, RunStart, TensorBoardLog, WandbLog
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.trainer import Trainer
from evenload.types.run import Validation
from evenload.types.text import counted

_TRACKERS: dict[Tracker, Callable[[], Callback]] = {"wandb": WandbLog, "tensorboard": TensorBoardLog}


def trackers(config: LogConfig) -> tuple[Callback, ...]:
    """Those that a run asks for, nothing opened yet."""
    require_trackers(config)
    return tuple(_TRACKERS[name]() for name in config.to)


class CallbackCalls:
    """The callbacks of one start of a run; none on other ranks than 0."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Trainer) -> None:
        of_run = (*trackers(trainer.config.log), *callbacks) if trainer.mesh.rank == 0 else ()
        self._callbacks, self._trainer = of_run, trainer
        self._begun: list[Callback] = []
        self.end_reason: EndReason = "failed"
        """What `on_end` is told; changed where training ends in another way."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """From `on_start` to `on_end`, which comes whatever happens, once for each callback that has begun."""
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
                self._call(one, "on_start", one.on_start, start)
            yield
        except BaseException:
            self._end_after_failure()
            raise
        self._end()

    def step(self, report: StepReport) -> None:
        for one in self._callbacks:
            self._call(one, "on_step", one.on_step, report)
        if report.validation is not None:
            self.validation(report.validation)
        if report.saved is not None:
            self.checkpoint(report.saved.path)

    def validation(self, validation: Validation) -> None:
        for one in self._callbacks:
            self._call(one, "on_validation", one.on_validation, validation)

    def checkpoint(self, path: Path) -> None:
        for one in self._callbacks:
            self._call(one, "on_checkpoint", one.on_checkpoint, path)

    def _end(self) -> None:
        end = RunEnd(steps_done=self._trainer.steps_done, reason=self.end_reason)
        while self._begun:
            one = self._begun.pop(0)
            try:
                self._call(one, "on_end", one.on_end, end)
            except EvenloadError:
                self._end_after_failure()
                raise

    def _end_after_failure(self) -> None:
        """What fails now must not hide what failed first."""
        end = RunEnd(steps_done=self._trainer.steps_done, reason="failed")
        while self._begun:
            one = self._begun.pop(0)
            try:
                self._call(one, "on_end", one.on_end, end)
            except EvenloadError as error:
                from evenload.cli.launch import tell

                tell(f"warning: {error}")

    def _call(self, one: Callback, name: str, method: Callable, argument: object) -> None:
        try:
            method(argument)
        except EvenloadError:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise CallbackError(
                f"callback {type(one).__name__}.{name} raised {type(error).__name__}: {error} ({last.filename}, line "
                f"{last.lineno}), after {counted(self._trainer.steps_done, 'step')}; training stops, and goes on "
                f"from the last "
                "checkpoint once that is mended"
            ) from error
