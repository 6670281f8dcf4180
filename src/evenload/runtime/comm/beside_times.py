"""How long transfers that run beside compute take, and how long compute waits for them: one step of one rank."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from evenload.runtime.comm.side_queue import Span
from evenload.runtime.comm.transfer_queue import transfer_queue
from evenload.runtime.device import HostClock, step_clock


class TransferTimes(NamedTuple):
    """Seconds of some transfers, and of these the ones in which nothing was computed meanwhile."""

    transfer_s: float
    waited_s: float

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.transfer_s - self.waited_s)


NO_TRANSFERS = TransferTimes(0.0, 0.0)


class BesideTimes:
    """Transfers of one kind in the device's queue (`transfer_queue.py`), which may hold those of other kinds too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock: HostClock = step_clock(device)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what was measured."""
        self._spans: list[Span] = []
        self._waits: list[Span] = []
        self._clock.start()

    def start(self, call: Callable[[], object]) -> "TimedTransfer":
        """Run a blocking collective in the queue; does not wait."""
        spans, mark = self._spans, self._clock.mark

        def timed() -> None:
            # On a GPU marks are of the stream that is current, which is the queue's.
            begin = mark()
            call()
            spans.append(Span(begin, mark()))

        return TimedTransfer(transfer_queue(self._device).start(timed).wait, self)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait for a transfer."""
        begin = self._clock.mark()
        yield
        self._waits.append(Span(begin, self._clock.mark()))

    def read(self) -> TransferTimes:
        """Of the step. Waits for a GPU."""
        return TransferTimes(self._seconds(self._spans), self._seconds(self._waits))

    def _seconds(self, spans: list[Span]) -> float:
        starts, ends = (self._clock.seconds([span[side] for span in spans]) for side in (0, 1))
        return sum(ends) - sum(starts)


class TimedTransfer:
    """One transfer under way, waited for as a `dist.Work` is."""

    def __init__(self, wait: Callable[[], None], times: BesideTimes) -> None:
        self._wait, self._times = wait, times

    def wait(self) -> None:
        with self._times.waiting():
            self._wait()
