"""`StepLines`: what is shown of steps: on a terminal a line that moves, and everywhere a line a step, at most one in
`log.lines_every_s`. What happens beside steps is for the caller to show."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from evenload.report.run_files import MetricRow
from evenload.report.table import progress_text, step_line

BAR_WIDTH = 20


class StepLines:
    """Of one start of a run.

    Args:
        every_s: seconds between two lines; 0 = every step has one.
        total: steps of the run; None = nobody knows.
    """

    def __init__(self, console: Console, every_s: float, steps_done: int, total: int | None) -> None:
        self._console, self._every_s = console, every_s
        self._is_first, self._next_s = True, 0.0
        self._waiting: MetricRow | None = None
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("first step", total=total, completed=steps_done)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """The line that moves, on a terminal; at the end the last step has its line."""
        with self._progress:
            yield
        if self._waiting is not None:
            self._print(self._waiting)

    def show(self, row: MetricRow, steps_done: int) -> None:
        """A step's line, where it is time for one."""
        self._progress.update(self._task, completed=steps_done, description=progress_text(row))
        # The second step is the first whose speed tells something.
        if self._is_first or time.monotonic() >= self._next_s:
            self._next_s = 0.0 if self._is_first else time.monotonic() + self._every_s
            self._is_first = False
            self._print(row)
        else:
            self._waiting = row

    def _print(self, row: MetricRow) -> None:
        self._waiting = None
        self._console.print(step_line(row), soft_wrap=True, markup=False)
