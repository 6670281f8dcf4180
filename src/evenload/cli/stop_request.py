"""`StopRequest`: a signal, or a request of the launcher, that the run shall end after the running step.

The first signal is noted and nothing else; training asks at the end of a step, all ranks agree there, and a checkpoint
is saved. A signal that comes a second or more after the first ends the process at once. Closer ones are the same
request: a scheduler, `timeout` and a launcher may each tell a process of one stop.

The launcher and its ranks share a `StopLine`, three numbers in shared memory: signals to the launcher reach ranks by it
and not as signals, so that Ctrl-C, which the terminal sends to all processes, is one request and not two.
"""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SAME_REQUEST_S = 1.0


class StopLine:
    """What a launcher and its ranks tell each other. Made before the ranks start, handed to them as an argument.

    asked         by the launcher: the signal because of which to end after the running step; 0 = none
    is_training   by a rank: from now on `asked` is read
    has_failed    by a rank: it ends with an error, so the others have nothing to wait for
    """

    def __init__(self) -> None:
        shared = multiprocessing.get_context("spawn")
        self.asked: Any = shared.Value(ctypes.c_int, 0, lock=False)
        self.is_training: Any = shared.Value(ctypes.c_bool, False, lock=False)
        self.has_failed: Any = shared.Value(ctypes.c_bool, False, lock=False)


class StopRequest:
    """Whether this rank was asked to stop; without a line to our launcher, by a signal."""

    def __init__(self, line: StopLine | None = None) -> None:
        self._line = line
        self._signal = 0
        self._since_s = 0.0
        self._parent = os.getppid()
        self._had_terminal = os.isatty(2)

    @property
    def signal(self) -> int:
        """That asked to stop; 0 = go on."""
        return self._signal or (self._line.asked.value if self._line is not None else 0)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note signals in here instead of ending by them. Main thread only."""
        before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        if self._line is not None:
            self._line.is_training.value = True
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        # torch has the kernel send SIGINT to ranks whose parent, the fork server, died: nobody tells how they end.
        is_orphan = self._line is not None and os.getppid() != self._parent
        if is_orphan or (self._signal and time.monotonic() - self._since_s >= SAME_REQUEST_S):
            os._exit(128 + number)
        if not self._signal:
            self._signal, self._since_s = number, time.monotonic()
        if number == signal.SIGHUP and self._had_terminal and not os.isatty(2):
            # The terminal is gone, and what is printed would be an error instead of a checkpoint.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.close(nowhere)


def signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
