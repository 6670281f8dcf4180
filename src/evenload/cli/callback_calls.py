"""`CallbackCalls`: trackers and a caller's callbacks are told of a run, on rank 0; an exception of theirs is told in
words and stops the run."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from evenload.config.sections import LogConfig, Tracker, require_trackers
from evenload.config.train_config import TrainConfig
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


DIRECTORY = "profile"


class StepProfile:
    """Records what this rank does from the end of the step before the first to the end of the last. What was recorded
    is written on exit, also where training ends before; the file is named by the steps that ended.

    Args:
        rank: of the process, in the file's name.
        steps_done: before training begins here; steps of an earlier start are not recorded again.
    """

    def __init__(self, config: TrainConfig, rank: int, steps_done: int) -> None:
        self._steps = range(*config.log.profile_steps or (0, 0))
        self._directory = Path(config.train.output_dir) / DIRECTORY
        self._rank, self._is_cuda = rank, config.train.device == "cuda"
        self._running: profile | None = None
        self._first = 0
        self._begin_at(steps_done)

    def after_step(self, steps_done: int) -> str:
        """Begins and ends recording; what to tell people, or ""."""
        told = ""
        if self._running is not None and steps_done not in self._steps:
            told = self._write(steps_done)
        self._begin_at(steps_done)
        self._steps_done = steps_done
        return told

    def __enter__(self) -> "StepProfile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._running is None:
            return
        try:
            self._write(self._steps_done)
        except Exception as second:
            if error is None:
                raise
            # What fails now must not hide what failed first.
            from evenload.cli.launch import tell

            tell(
                f"warning: the profile of rank {self._rank} could not be written after the error that ends training: "
                f"{type(second).__name__}: {second}"
            )

    def _begin_at(self, step: int) -> None:
        self._steps_done = step
        if self._running is None and step in self._steps:
            # The first one of a start that came in the middle records what is left.
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
            self._running, self._first = profile(activities=kinds), step
            self._running.start()

    def _write(self, end: int) -> str:
        """A file of the steps that ended, [first, `end`); none where none did."""
        assert self._running is not None
        recorded, self._running = self._running, None
        if self._is_cuda:
            torch.cuda.synchronize()
        recorded.stop()
        if end <= self._first:
            return ""
        self._directory.mkdir(parents=True, exist_ok=True)
        file = self._directory / f"steps-{self._first}-to-{end - 1}-rank-{self._rank:05d}.json"
        recorded.export_chrome_trace(str(file))
        return f"profile of steps {self._first} to {end - 1}, a file a process: {file} (open at ui.perfetto.dev)"
