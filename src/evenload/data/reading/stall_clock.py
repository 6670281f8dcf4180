"""`StallClock`: since when a worker has given no sign of life, and how long that may last.

A worker first starts (a process imports its modules and receives its job), which on a loaded machine or a slow disk
takes long and says nothing about the source; then it reads. The two have limits of their own. While it reads, every
file it opens and every block it delivers is a sign of life.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from evenload.errors import DataError

START_TIMEOUT_S = 300.0
"""How long a worker may take to start; where `data.stall_timeout_s` is longer, that long."""


@dataclass(slots=True)
class _Worker:
    """Its last sign of life by the clock, and the file that it opened last (None = none yet)."""

    last_sign_s: float
    started: bool = False
    reading: str | None = None


class StallClock:
    """Of all workers of a `BlockService`. Any thread may call it.

    Args:
        changed: told of every sign of life, which moves the limit of whoever waits.
        stall_timeout_s: how long a worker that reads may give no sign of life.
        now_s: the time, on any monotonic clock.
    """

    def __init__(
        self, changed: threading.Condition, stall_timeout_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._changed, self._stall_timeout_s, self._now_s = changed, stall_timeout_s, now_s
        self._workers: dict[int, _Worker] = {}

    def starts(self, worker: int) -> None:
        """The worker, or the one that replaces it, is being started."""
        with self._changed:
            self._workers[worker] = _Worker(self._now_s())

    def has_started(self, worker: int) -> None:
        with self._changed:
            self._workers[worker].started = True
            self.delivers(worker)

    def opens(self, worker: int, name: str) -> None:
        with self._changed:
            self._workers[worker].reading = name
            self.delivers(worker)

    def delivers(self, worker: int) -> None:
        with self._changed:
            self._workers[worker].last_sign_s = self._now_s()
            self._changed.notify_all()

    def left_s(self, worker: int, asked_s: float, wanted: str) -> float:
        """How long one may still wait for the worker, which had something to do from `asked_s` on at the latest.

        Args:
            wanted: what is waited for, for the message.

        Raises:
            DataError: no sign of life for too long; says whether the worker did not start or which file it was reading.
        """
        with self._changed:
            known, now_s = replace(self._workers[worker]), self._now_s()
        since_s, limit_s = max(known.last_sign_s, asked_s), self._stall_timeout_s
        problem = (
            f"the data source gave nothing for {limit_s:g} s; it was reading {known.reading or 'no file yet'} "
            f"({wanted}); check the storage, or raise data.stall_timeout_s"
        )
        if not known.started:
            since_s, limit_s = known.last_sign_s, max(START_TIMEOUT_S, self._stall_timeout_s)
            problem = (
                f"data worker {worker} has not started within {limit_s:g} s: its process is still importing Python "
                "modules or receiving its settings, and no file was opened; look whether the machine is overloaded or "
                "the disk that holds Python is slow, set data.workers = 0 to read in the training process, or raise "
                "data.stall_timeout_s"
            )
        left_s = since_s + limit_s - now_s
        if left_s <= 0:
            raise DataError(problem)
        return left_s
