"""`StepProfile`: torch's profiler around steps of a run (`log.profile_steps`), one Chrome trace a process."""

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from evenload.config.train_config import TrainConfig

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
