"""`Saves`: when a run saves, and what becomes of it.

Ranks may learn at different steps that a save has ended, but start the next one at the same step.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from evenload.config.sections import RunConfig
from evenload.errors import CheckpointError
from evenload.runtime.checkpoint.checkpoint import RunPosition
from evenload.runtime.checkpoint.directory import checkpoint_path, checkpoints_of, latest_checkpoint
from evenload.runtime.checkpoint.writer import CheckpointWriter, SavedCheckpoint
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.optimizer import ShardedOptimizer
from evenload.runtime.optim.parameter_units import FlatBuffer


class Saves:
    """Saves of one run, on one rank; `position` is asked when a save starts."""

    def __init__(self, settings: RunConfig, writer: CheckpointWriter, position: Callable[[], RunPosition]) -> None:
        self._settings, self._writer, self._position = settings, writer, position
        self._directory = checkpoints_of(settings.output_dir)
        self._saved_steps = -1
        self._saved_at_s = time.monotonic()
        self._settled: tuple[SavedCheckpoint | None, str] | None = None

    def note_resumed(self, steps_done: int) -> None:
        """A checkpoint holds the steps done."""
        self._saved_steps = steps_done

    def move_to(self, buffers: list[FlatBuffer], optimizer: ShardedOptimizer, mesh: Mesh) -> None:
        """Saves are of that state from now on."""
        self._writer.move_to(buffers, optimizer, mesh)

    def begin(self) -> None:
        self._saved_at_s = time.monotonic()

    def is_time(self) -> bool:
        """`train.checkpoint_every_s` has passed on this rank's clock since the last save."""
        interval_s = self._settings.checkpoint_interval_s
        return bool(interval_s) and time.monotonic() - self._saved_at_s >= interval_s

    def after_step(self, steps_done: int, *, is_time: bool) -> tuple[SavedCheckpoint | None, str]:
        """Start a checkpoint where one is due; (what was completed, what failed) since the last step. Collective.

        Args:
            is_time: of the rank whose clock counts.

        Raises:
            CheckpointError: one failed and `train.on_failed_checkpoint` is "stop".
        """
        from_s, every = time.perf_counter(), self._settings.checkpoint_every_steps
        if not (is_time or (every and steps_done % every == 0)):
            return self._end(only_if_done=True)
        outcome = self._end()
        self._start(from_s)
        return outcome if self._settings.background_checkpoints else self._end()

    def settle(self) -> None:
        """Wait for the save under way, so that the directory stays as it is; the next `after_step` tells what became
        of it. Collective. Raises as `after_step`."""
        self._settled = self._end()

    def save(self, steps_done: int, *, again: bool = False) -> Path:
        """Have a complete checkpoint of the steps done, or `CheckpointError` in any case. Collective.

        Args:
            again: write it although there is one: what goes with the weights has changed.
        """
        self._end()
        if again or self._saved_steps != steps_done:
            self._start(time.perf_counter())
            self._writer.wait()
        return checkpoint_path(self._directory, steps_done)

    def newest(self) -> Path | None:
        """The newest checkpoint, once the one under way has ended; for a run that gives up for another reason."""
        with contextlib.suppress(CheckpointError):  # what is told is why the run ends
            self._end()
        return latest_checkpoint(self._directory)

    def _start(self, from_s: float) -> None:
        position = self._position()
        self._writer.start(position, from_s)
        self._saved_steps, self._saved_at_s = position.progress.steps_done, time.monotonic()

    def _end(self, *, only_if_done: bool = False) -> tuple[SavedCheckpoint | None, str]:
        if self._settled is not None:
            outcome, self._settled = self._settled, None
            return outcome
        try:
            return self._writer.wait(only_if_done=only_if_done), ""
        except CheckpointError as error:
            self._saved_steps = -1
            if self._settings.on_failed_checkpoint == "stop":
                raise
            return None, str(error)
