"""`StopRequest`: a signal that requests the run to end after the running step.

The first signal is recorded and nothing else; training reads it at the end of a step, all ranks agree there, and a
checkpoint is saved. A signal that comes two seconds or more after the first ends the process at once. Closer ones are
the same request: a terminal, a scheduler, `timeout` and a launcher may each send a process one stop.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SAME_REQUEST_S = 2.0


class StopRequest:
    """Whether this rank is to stop."""

    def __init__(self) -> None:
        self.signal = 0
        """The number of the signal that requested it; 0 = go on."""
        self._since_s = 0.0
        self._parent = os.getppid()
        self._had_terminal = os.isatty(2)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record signals in here instead of ending by them. Main thread only."""
        before = {number: signal.signal(number, self._record) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _record(self, number: int, frame: object) -> None:
        # torch has the kernel send SIGINT to ranks whose parent, the fork server, died: nobody reports how they end.
        if os.getppid() != self._parent or (self.signal and time.monotonic() - self._since_s >= SAME_REQUEST_S):
            os._exit(128 + number)
        if not self.signal:
            self.signal, self._since_s = number, time.monotonic()
        if number == signal.SIGHUP and self._had_terminal and not os.isatty(2):
            # The terminal is gone, and what is printed would be an error instead of a checkpoint.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            os.close(nowhere)


def signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
